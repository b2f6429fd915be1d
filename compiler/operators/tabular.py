"""Operators of classical machine learning (`ai.onnx.ml`): tables with one row per sample and one column per feature."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from math import prod
from typing import Any

import onnx_ir as ir

from splitc.compiler.operators import axes as ax
from splitc.compiler.operators.elementwise import elementwise
from splitc.compiler.operators.operation import Operation
from splitc.compiler.operators.operator import Operator

DOMAIN = "ai.onnx.ml"
# Name suffixes of attributes with the classes' labels.
TEXTS = ("strings",)
LABELS = (*TEXTS, "ints", "int64s")


def samples(op: Operation) -> None:
    """Rows are independent. A vector is a single row, which is needed whole."""
    for rows in op.given(number for number in range(len(op.inputs)) if number not in op.weights):
        for made in op.outputs:
            if len(rows) > 1 and made is not None:
                op.relate(rows[0], made[0])


def columns(op: Operation) -> None:
    """All axes but the last, of features, are the same: attributes refer to features by index."""
    op.relate_all(op.input(0)[:-1], op.output()[:-1])


def picked_columns(op: Operation) -> None:
    """The last axis of the output has the selected elements of each row, one after the other."""
    columns(op)
    op.relate(ax.product(op.input(1)), op.output()[-1])
    op.free(op.input(1))


def encoded(op: Operation) -> None:
    """The output has one more axis, with an entry for each category."""
    op.relate_all(op.input(0), op.output())


def feature_shape(context: Any, node: ir.Node) -> None:
    """Selected entries of the last axis, as at least two axes. The library takes only the last axis of the indices."""
    data, indices = node.inputs
    if data is None or data.shape is None or indices is None or indices.shape is None or data.dtype is None:
        return
    rows = data.shape[:-1] if len(data.shape) > 1 else (1,)
    context.set_shape_and_dtype(node.outputs[0], ir.Shape([*rows, prod(indices.shape)]), data.dtype)


def same_shape(context: Any, node: ir.Node) -> None:
    """The same shape, as floats; for an Imputer, in the same type."""
    (data,) = node.inputs
    dtype = data.dtype if data is not None and node.op_type == "Imputer" else ir.DataType.FLOAT
    _set(context, node.outputs[0], data, lambda shape: shape, dtype)


def encoded_shape(context: Any, node: ir.Node) -> None:
    count = max(_count(node, "cats_int64s"), _count(node, "cats_strings"))
    _set(context, node.outputs[0], node.inputs[0], lambda shape: [*shape, count])


def joined_shape(context: Any, node: ir.Node) -> None:
    """The features of all inputs. An attribute has the number of each input's features."""
    sizes = node.attributes.get_ints("inputdimensions", ())
    if sizes:
        _set(context, node.outputs[0], node.inputs[0], lambda shape: [_rows(shape), sum(sizes)])


def targets_shape(context: Any, node: ir.Node) -> None:
    """A column of numbers for each target."""
    count = node.attributes.get_int("targets" if node.op_type == "LinearRegressor" else "n_targets", 1)
    _set(context, node.outputs[0], node.inputs[0], lambda shape: [_rows(shape), count])


def classes_shapes(context: Any, node: ir.Node) -> None:
    """The label of each row, and a score for each class; for a vector machine without probabilities, for each pair."""
    data, attributes = node.inputs[0], node.attributes
    classes = max(_count(node, f"classlabels_{kind}") for kind in LABELS)
    label = ir.DataType.STRING if any(_count(node, f"classlabels_{kind}") for kind in TEXTS) else ir.DataType.INT64
    _set(context, node.outputs[0], data, lambda shape: [_rows(shape)], label)
    if "vectors_per_class" in attributes and "prob_a" not in attributes:
        classes = max(classes, classes * (classes - 1) // 2)
    scores = classes if classes > 1 else context.new_symbolic_dim()
    _set(context, node.outputs[1], data, lambda shape: [_rows(shape), scores])


def _set(
    context: Any,
    value: ir.Value,
    data: ir.Value | None,
    shape_of: Callable[[ir.Shape], Iterable[Any]],
    dtype: ir.DataType | None = ir.DataType.FLOAT,
) -> None:
    """Set the type, which ONNX infers for none of these operators, and the shape, computed from that of the data."""
    known = None if data is None else data.shape
    context.set_shape_and_dtype(value, None if known is None else ir.Shape([*shape_of(known)]), dtype)


def _count(node: ir.Node, name: str) -> int:
    """The length of an attribute; 0 without it."""
    return len(node.attributes[name].value) if name in node.attributes else 0


def _rows(shape: ir.Shape) -> Any:
    return shape[0] if len(shape) > 1 else 1


def _entries(rule: Callable[[Operation], None], shapes: Any, *names: str) -> list[Operator]:
    return [Operator(f"{DOMAIN}.{name}", rule, shapes=shapes) for name in names]


OPERATORS = (
    *_entries(elementwise, None, "Binarizer", "LabelEncoder"),
    *_entries(columns, same_shape, "Imputer", "Normalizer", "Scaler"),
    *_entries(picked_columns, feature_shape, "ArrayFeatureExtractor"),
    *_entries(encoded, encoded_shape, "OneHotEncoder"),
    *_entries(samples, joined_shape, "FeatureVectorizer"),
    *_entries(samples, None, "TreeEnsemble"),
    *_entries(samples, targets_shape, "LinearRegressor", "SVMRegressor", "TreeEnsembleRegressor"),
    *_entries(samples, classes_shapes, "LinearClassifier", "SVMClassifier", "TreeEnsembleClassifier"),
)
