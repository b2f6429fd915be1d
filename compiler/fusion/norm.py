"""RMSNorm that was written out becomes one operator: x / sqrt(mean(x x) + epsilon) x weights, along the last axis.

ONNX Runtime fuses by itself what divides by the root. What multiplies by its reciprocal, as torch's exporters write it,
it leaves as six or more operators, in single precision between casts.
"""

from __future__ import annotations

from dataclasses import dataclass

import onnx_ir as ir

from splitc.compiler.frontend.editor import Editor
from splitc.compiler.frontend.origins import hand_over
from splitc.compiler.fusion.attention import NotFusedError
from splitc.compiler.fusion.operand import constant
from splitc.compiler.fusion.sizes import Sizes, is_one
from splitc.compiler.fusion.softmax import is_over_last
from splitc.compiler.fusion.writing import Writer

OPERATOR = "SimplifiedLayerNormalization"


@dataclass(frozen=True)
class Norm:
    """`data` divided by the root of the mean of its squares, or times its reciprocal, times `weights`."""

    data: ir.Value
    weights: ir.Value
    epsilon: float
    output: ir.Value
    by_reciprocal: bool


def find_norm(mean: ir.Node) -> Norm | None:
    """The RMSNorm around a mean of squares; None if that is none.

    Raises NotFusedError for one that the operator can't do.
    """
    if mean.op_type != "ReduceMean" or mean.domain or not is_over_last(mean, None):
        return None
    data = _squared(mean.inputs[0])
    root = None if data is None else _find_root(mean.outputs[0])
    if data is None or root is None:
        return None
    normal = _divided(data, *root[:2])
    if normal is None:
        return None
    if not mean.attributes.get_int("keepdims", 1):
        raise NotFusedError("its mean loses an axis")
    output, weights = _weighted(normal)
    return Norm(_narrow(data, output), weights, root[2], output, root[1])


def _squared(value: ir.Value | None) -> ir.Value | None:
    """What a value is the square of."""
    node = None if value is None else value.producer()
    if node is None or node.domain:
        return None
    one, other = node.inputs[:2] if len(node.inputs) > 1 else (None, None)
    if (node.op_type == "Mul" and one is other) or (node.op_type == "Pow" and constant(other) == 2):
        return one
    return None


def _find_root(mean: ir.Value) -> tuple[ir.Value, bool, float] | None:
    """The root of a mean and a small number, whether it is its reciprocal, and the number."""
    total = only_user(mean, "Add")
    epsilon = None if total is None else constant(total.inputs[1]) or constant(total.inputs[0])
    if total is None or epsilon is None:
        return None
    power = only_user(total.outputs[0], "Pow")
    if power is not None:
        return (power.outputs[0], True, epsilon) if constant(power.inputs[1]) == -0.5 else None
    root = only_user(total.outputs[0], "Sqrt")
    if root is None:
        return None
    turned = only_user(root.outputs[0], "Reciprocal") or only_user(root.outputs[0], "Div")
    if turned is not None and (turned.op_type == "Reciprocal" or constant(turned.inputs[0]) == 1):
        return turned.outputs[0], True, epsilon
    return root.outputs[0], False, epsilon


def _divided(data: ir.Value, root: ir.Value, is_reciprocal: bool) -> ir.Value | None:
    """The data divided by a root."""
    node = only_user(root, "Mul" if is_reciprocal else "Div")
    if node is None or set(node.inputs) != {data, root} or (not is_reciprocal and node.inputs[0] is not data):
        return None
    return node.outputs[0]


def _weighted(normal: ir.Value) -> tuple[ir.Value, ir.Value]:
    """What has the data's norm times weights, and the weights; in the type that it is read in."""
    cast = only_user(normal, "Cast")
    value = normal if cast is None else cast.outputs[0]
    product = only_user(value, "Mul")
    if product is None or product.inputs[0] is product.inputs[1]:
        readers = sorted({usage.node.op_type for usage in value.uses()})
        raise NotFusedError(f"it is multiplied by no weights, but read by {' and '.join(readers) or 'no node'}")
    one, other = product.inputs
    weights = other if one is value else one
    assert weights is not None
    after = only_user(product.outputs[0], "Cast") if cast is None else None
    if after is not None and after.outputs[0].dtype == ir.DataType.FLOAT16:
        return after.outputs[0], weights
    return product.outputs[0], weights


def _narrow(data: ir.Value, output: ir.Value) -> ir.Value:
    """The data before it was cast to single precision, in which the operator computes anyway."""
    node = data.producer()
    source = node.inputs[0] if node is not None and node.op_type == "Cast" and not node.domain else None
    return source if source is not None and source.dtype == output.dtype else data


def only_user(value: ir.Value, operator: str) -> ir.Node | None:
    """The one node that reads a value, if it is of this operator."""
    users = dict.fromkeys(node for node, _ in value.uses())
    node = next(iter(users), None)
    fits = node is not None and len(users) == 1 and node.op_type == operator and not node.domain
    return node if fits and not value.is_graph_output() else None


def other_input(node: ir.Node, value: ir.Value) -> ir.Value | None:
    """What a node of two inputs reads beside a value; None if that is the value too."""
    one, other = node.inputs
    return other if one is value and other is not value else one if other is value and one is not value else None


def write_norm(norm: Norm, editor: Editor, sizes: Sizes) -> None:
    """Replace what was found by the operator, in place.

    Raises NotFusedError if the operator can't say it; then nothing is changed.
    """
    data, weights, output = sizes.axes(norm.data), sizes.axes(norm.weights), sizes.axes(norm.output)
    if data is None or weights is None or output is None or norm.output.dtype is None:
        raise NotFusedError("it has no known sizes, or no known type")
    one_row = bool(weights) and weights[-1].size == data[-1].size and is_one(weights[:-1])
    if not one_row or [axis.size for axis in output] != [axis.size for axis in data]:
        raise NotFusedError("it is multiplied by what is no weight for each place of the last axis")
    if not norm.by_reciprocal:
        raise NotFusedError("ONNX Runtime fuses this form by itself")
    at = norm.output.producer()
    assert at is not None
    work = Writer(at, norm.output.name or "", (), editor, sizes)
    scale = work.viewed(norm.weights, data[-1:], "norm_row")
    if scale.dtype != norm.data.dtype:
        scale = work.cast(scale, norm.data, "norm_weights")
    made = work.add("norm", OPERATOR, [norm.data, scale], norm.data, data, axis=-1, epsilon=norm.epsilon, stash_type=1)
    if made.dtype != norm.output.dtype:
        made = work.cast(made, norm.output, "norm_cast")
    norm.output.replace_all_uses_with(made, replace_graph_outputs=True)
    hand_over(norm.output, made, "unfused")
    sizes.put(made, data)
