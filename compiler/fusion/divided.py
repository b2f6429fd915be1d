"""Replaces a MatMul and the Split of its columns by one MatMul for each part.

Models have the two projections of a gated layer, or those to queries, keys and values, as one product and a Split. The
Split copies the parts, and prevents the fusion of a following bias or activation with its product.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import onnx_ir as ir

from splitc.compiler.graphs.matching import combined, is_onnx, is_own, only_user, own_matrix, tensor_of
from splitc.compiler.graphs.walks import producer_of
from splitc.compiler.patterns.context import Context
from splitc.compiler.patterns.errors import NotFusedError
from splitc.compiler.patterns.kernels import check_type
from splitc.compiler.patterns.sizes import Axis, fixed_axis
from splitc.compiler.patterns.writing import Writer

OPERATOR = "MatMul"


@dataclass(frozen=True)
class Divided:
    """A product `whole` of `data` and `weight`, plus `bias` if there is one, and the Split's `parts` of its columns.

    The columns are the weight's axis 1, or axis 0 if a Transpose follows the weight.
    """

    product: ir.Node
    data: ir.Value
    weight: ir.Value
    axis: int
    bias: ir.Value | None
    whole: ir.Value
    parts: tuple[ir.Value, ...]


def find_divided(product: ir.Node) -> Divided | None:
    """The product with its parts; None for other nodes, and if the result has other readers."""
    if not is_onnx(product, OPERATOR) or len(product.inputs) != 2:
        return None
    data, weight = product.inputs
    stored = None if weight is None else own_matrix(weight)
    if data is None or stored is None:
        return None
    whole, bias = product.outputs[0], None
    if only_user(whole, "Add") is not None:
        total = combined(whole, "Add")
        if total is None or not is_own(total[0], 1):
            return None
        bias, whole = total
    split = only_user(whole, "Split")
    if split is None or len(split.outputs) < 2:
        return None
    return Divided(product, data, *stored, bias, whole, tuple(split.outputs))


def fuse_divided(product: ir.Node, context: Context) -> str | None:
    """Replace a product and the Split of its columns by a product for each part. Returns MatMul; None for other nodes.

    Raises NotFusedError, before any change, if the parts are not columns of known numbers.
    """
    divided = find_divided(product) if context.gains.divided else None
    if divided is None:
        return None
    check_type(divided.whole, context.gains.divided)
    shape, bias = context.shape_of(divided.whole), divided.bias
    if shape is None or math.prod(shape[:-1]) < context.gains.least_rows:
        raise NotFusedError("it has too few rows for several products to be faster")
    axes = context.sizes.known(divided.whole, "its result")
    if producer_of(divided.parts[0]).attributes.get_int("axis", 0) not in (-1, len(axes) - 1):
        raise NotFusedError("its Split is not along the last axis")
    if any(part.is_graph_output() for part in divided.parts):
        raise NotFusedError("one of its parts is an output of the model")
    counts = context.sizes.fixed_parts(divided.parts, -1)
    stored = [tensor_of(divided.weight).shape[divided.axis], *([] if bias is None else tensor_of(bias).shape)]
    if any(size != axes[-1].fixed for size in stored):
        raise NotFusedError("its bias or its weight has one number for all columns")
    start = 0
    for number, (part, count) in enumerate(zip(divided.parts, counts, strict=True)):
        work = Writer.of(part, context, name=part.name or f"{divided.whole.name}/{number}")
        made = _write_part(divided, slice(start, start + count), [*axes[:-1], fixed_axis(count)], work)
        work.take_place(made, part)
        start += count
    return OPERATOR


def _write_part(divided: Divided, columns: slice, axes: Sequence[Axis], work: Writer) -> ir.Value:
    """The product with these columns of the weight, plus those of the bias."""
    weight = work.editor.part_of(divided.weight, divided.axis, columns)
    if divided.axis == 0:
        count = fixed_axis(columns.stop - columns.start)
        rows = fixed_axis(int(tensor_of(divided.weight).shape.numpy()[1]))
        weight = work.add("columns", "Transpose", [weight], divided.weight, [rows, count], perm=[1, 0])
    made = work.add("product", OPERATOR, [divided.data, weight], divided.whole, axes)
    if divided.bias is None:
        return made
    bias = work.editor.part_of(divided.bias, 0, columns)
    return work.add("biased", "Add", [made, bias], divided.whole, axes)
