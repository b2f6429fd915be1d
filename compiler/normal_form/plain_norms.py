"""Writes means and norms as most exporters write them: c / sqrt(mean(c^2) + e) * g + b, where c is x - mean(x).

XLA's exporters write means as sums over the axis, its size as a divisor and a Reshape that brings the axis back.
TensorFlow's write norms as x * m + (b - mean(x) * m), where m = g / sqrt(...), and a mean over the last of three axes
as a pool. Flax takes mean(x^2) - mean(x)^2 for the mean of squares. Where a mean is computed twice, once is enough.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Hashable

import onnx_ir as ir

from splitc.compiler.graphs.editor import Editor
from splitc.compiler.graphs.matching import (
    constant,
    input_orders,
    list_of,
    made_by,
    only_user,
    readers_of,
    root_of_square,
    value_before,
)
from splitc.compiler.inference.shapes import fixed_size
from splitc.compiler.nodes import known_tensor, settings_of
from splitc.compiler.normal_form.constants import bypass

_REDUCTIONS = ("ReduceMean", "ReduceSum", "ReduceSumSquare", "ReduceMax", "ReduceMin")
# The relative tolerance of a constant that is one over a size.
_CLOSE = 1e-6


def size_of(value: ir.Value | None, axis: int) -> int | None:
    """An axis' size, if it is a number."""
    return None if value is None or value.shape is None else fixed_size(value.shape[axis])


def is_known(shape: ir.Shape | None) -> bool:
    """Whether each size of a shape is a number or has a name."""
    return shape is not None and all(isinstance(size, int) or size.value is not None for size in shape)


def added_axes(unsqueeze: ir.Node, rank: int) -> set[int]:
    """The axes that an Unsqueeze adds to a result of so many axes; empty if they are not known."""
    return {axis % rank for axis in list_of(unsqueeze, "axes") or ()}


def keep_axes(view: ir.Node, editor: Editor) -> bool:
    """Let a reduction keep its axes that a view brings back."""
    reduction = made_by(view.inputs[0], *_REDUCTIONS)
    if reduction is None or not _is_only_reader(view, reduction.outputs[0]) or not _brings_back(view, reduction):
        return False
    settings = settings_of(reduction) | {"keepdims": 1}
    editor.replace(view, ir.node(reduction.op_type, reduction.inputs, settings))
    return True


def _is_only_reader(node: ir.Node, value: ir.Value) -> bool:
    """Whether nothing else reads a value, except its sizes."""
    return readers_of(value) == [node] and not value.is_graph_output()


def _brings_back(view: ir.Node, reduction: ir.Node) -> bool:
    """Whether an Unsqueeze or a Reshape gives a reduced value the axes of size 1 in the places of those reduced."""
    axes, source = _reduced_axes(reduction), reduction.inputs[0]
    if axes is None or source is None or source.shape is None or _keeps_axes(reduction):
        return False
    if view.op_type == "Unsqueeze":
        return added_axes(view, len(source.shape)) == axes
    made, kept = view.outputs[0].shape, [1 if axis in axes else size for axis, size in enumerate(source.shape)]
    return made is not None and is_known(made) and list(made) == kept


def _reduced_axes(reduction: ir.Node) -> set[int] | None:
    """The axes of a reduction; None if they are not known."""
    data, axes = reduction.inputs[0], list_of(reduction, "axes")
    if not axes or data is None or data.shape is None:
        return None
    return {axis % len(data.shape) for axis in axes}


def average(node: ir.Node, editor: Editor) -> bool:
    """Replace a sum over axes that is divided by their size, or multiplied by one over it, by a mean."""
    for total, other in input_orders(node):
        reduction, number = made_by(total, "ReduceSum", "ReduceSumSquare"), known_tensor(other)
        if reduction is None or total is None or number is None or number.size != 1 or total.shape is None:
            continue
        axes = _reduced_axes(reduction)
        if axes is None or len(number.shape) > len(total.shape) or not _is_only_reader(node, total):
            continue
        (data, *_), factor = reduction.inputs, float(number.numpy().reshape(()))
        count = math.prod(size_of(data, axis) or 0 for axis in axes)
        if math.isclose(factor * count if node.op_type == "Mul" else factor / (count or 1), 1, rel_tol=_CLOSE):
            if reduction.op_type == "ReduceSumSquare":
                data = editor.before(node, "Mul", data, data)
            editor.replace(node, _mean(data, axes, reduction.attributes.get_int("keepdims", 1), editor))
            return True
    return False


def average_last(node: ir.Node, editor: Editor) -> bool:
    """Replace a pool over the last of three axes by a mean."""
    data = node.inputs[0]
    if data is None or data.shape is None or len(data.shape) != 3:
        return False
    editor.replace(node, _mean(data, {2}, 1, editor))
    return True


def _mean(data: ir.Value | None, axes: set[int], keepdims: int, editor: Editor) -> ir.Node:
    lists, attributes = editor.lists("ReduceMean", axes=sorted(axes))
    return ir.node("ReduceMean", [data, *lists], {**attributes, "keepdims": keepdims})


def take_root(node: ir.Node, editor: Editor) -> bool:
    """Replace a power of one half by a square root."""
    data, made = node.inputs[0], node.outputs[0]
    is_half = constant(node.inputs[1]) == 0.5
    if not is_half or data is None or data.shape is None or made.shape is None or len(data.shape) != len(made.shape):
        return False
    if data.dtype is None or not data.dtype.is_floating_point():  # Sqrt takes no integers
        return False
    editor.replace(node, ir.node("Sqrt", [data]))
    return True


def center_squares(node: ir.Node, editor: Editor) -> bool:
    """Replace mean(x^2) - mean(x)^2 by the mean of (x - mean(x))^2."""
    of_squares, mean = made_by(node.inputs[0], "ReduceMean"), made_by(root_of_square(node.inputs[1]), "ReduceMean")
    data = None if of_squares is None or mean is None else root_of_square(of_squares.inputs[0])
    if of_squares is None or mean is None or data is None or mean.inputs[0] is not data:
        return False
    axes, keepdims = _reduced_axes(mean), mean.attributes.get_int("keepdims", 1)
    if axes is None or axes != _reduced_axes(of_squares) or keepdims != of_squares.attributes.get_int("keepdims", 1):
        return False
    centered = _centered(data, mean if keepdims else _kept(mean, axes, editor))
    squares = editor.before(node, "Mul", centered, centered, dtype=data.dtype)
    squares.shape = data.shape
    editor.replace(node, _mean(squares, axes, keepdims, editor))
    return True


def _kept(mean: ir.Node, axes: set[int], editor: Editor) -> ir.Node:
    """The same mean with its axes kept."""
    kept = _mean(mean.inputs[0], axes, 1, editor)
    mean.append(kept)
    return kept


def _centered(data: ir.Value, mean: ir.Node) -> ir.Value:
    """The difference of a value and its mean."""
    node = ir.node("Sub", [data, mean.outputs[0]])
    mean.append(node)
    node.outputs[0].type, node.outputs[0].shape = data.type, data.shape
    return node.outputs[0]


def mean_key(node: ir.Node) -> Hashable:
    """What two means, or two differences of a value and its mean, have in common that are equal; None for others."""
    if node.op_type == "Sub":
        return tuple(node.inputs) if made_by(node.inputs[1], "ReduceMean") is not None else None
    if node.op_type != "ReduceMean":
        return None
    axes, data = _reduced_axes(node), node.inputs[0]
    is_subtracted = any(user.op_type == "Sub" and user.inputs[0] is data for user, _ in node.outputs[0].uses())
    return (data, frozenset(axes), _keeps_axes(node)) if axes is not None and is_subtracted else None


def skip_bound(node: ir.Node, editor: Editor) -> bool:
    """Skip the lower bound 0 of a mean of squares, by a Max, a Clip or a Relu."""
    for mean, *bounds in input_orders(node):
        of_squares = made_by(mean, "ReduceMean")
        is_lower = node.op_type == "Relu" or (len(bounds) == 1 and constant(bounds[0]) == 0)
        if mean is not None and of_squares is not None and root_of_square(of_squares.inputs[0]) and is_lower:
            return bypass(editor.graph, node, mean)
    return False


def center_first(node: ir.Node, editor: Editor) -> bool:
    """Replace x * m + (b - mean(x) * m) by (x - mean(x)) * m + b; b may be missing."""
    for product, rest in input_orders(node):
        for (data, factor), (other, same, bias) in itertools.product(factors(product), _subtracted(rest)):
            mean = made_by(other, "ReduceMean")
            if same is factor and mean is not None and mean.inputs[0] is data and _keeps_axes(mean):
                centered = _centered(data, mean)
                last = _weights_last(centered, factor, node, editor) or (centered, factor)
                if bias is None:
                    editor.replace(node, ir.node("Mul", last))
                else:
                    scaled = editor.before(node, "Mul", *last, dtype=data.dtype)
                    editor.replace(node, ir.node("Add", [scaled, bias]))
                return True
    return False


def _keeps_axes(reduction: ir.Node) -> bool:
    return reduction.attributes.get_int("keepdims", 1) == 1


def _subtracted(value: ir.Value | None) -> list[tuple[ir.Value, ir.Value, ir.Value | None]]:
    """The factors p and q, in both orders, and b of a value that is b - p * q; b is None if it is -p * q."""
    node = made_by(value, "Sub", "Add")
    one, other = (None, None) if node is None else node.inputs
    if node is not None and node.op_type == "Sub":
        return [(*pair, one) for pair in factors(other)]
    terms = [(value, None), (one, other), (other, one)]
    return [(*pair, bias) for term, bias in terms for pair in _factors_of_negative(term)]


def _factors_of_negative(value: ir.Value | None) -> list[tuple[ir.Value, ir.Value]]:
    """The two factors whose negated product a value is, in both orders; none for any other value."""
    if (negated := value_before(value, "Neg")) is not None:
        return factors(negated)
    pairs = [(value_before(one, "Neg"), other) for one, other in factors(value)]
    return [(negated, other) for negated, other in pairs if negated is not None]


def factors(value: ir.Value | None) -> list[tuple[ir.Value, ir.Value]]:
    """The two factors of a product, in both orders; none for any other value."""
    node = made_by(value, "Mul")
    one, other = (None, None) if node is None else node.inputs
    return [] if one is None or other is None else [(one, other), (other, one)]


def divide_first(node: ir.Node, editor: Editor) -> bool:
    """Replace x * (1/root * g) by (x * 1/root) * g, if nothing else reads the second factor."""
    for data, factor in factors(node.outputs[0]):
        if only_user(factor, "Mul") is node and (last := _weights_last(data, factor, node, editor)) is not None:
            editor.replace(node, ir.node("Mul", last))
            return True
    return False


def scale_last(node: ir.Node, editor: Editor) -> bool:
    """Replace (g * x) / root by (x / root) * g, if it is the root of a mean of x^2; (g * x) * 1/root alike."""
    pairs = factors(node.outputs[0]) if node.op_type == "Mul" else [(node.inputs[0], node.inputs[1])]
    for scaled, root in pairs:
        for data, weights in factors(scaled):
            if is_known(data.shape) and data.shape == node.outputs[0].shape and _averages(root, data):
                normal = editor.before(node, node.op_type, data, root, dtype=data.dtype)
                normal.shape = data.shape
                editor.replace(node, ir.node("Mul", [normal, weights]))
                return True
    return False


def _averages(root: ir.Value | None, data: ir.Value) -> bool:
    """Whether a value is the root of a mean of squares of these data, plus a constant or not, or one over it."""
    while (node := made_by(root, "Reciprocal", "Div", "Sqrt", "Pow")) is not None:
        root = node.inputs[1 if node.op_type == "Div" else 0]
    total = made_by(root, "Add")
    means = [made_by(value, "ReduceMean") for value in ([root] if total is None else total.inputs)]
    return any(mean is not None and root_of_square(mean.inputs[0]) is data for mean in means)


def _weights_last(data: ir.Value, factor: ir.Value, node: ir.Node, editor: Editor) -> tuple[ir.Value, ir.Value] | None:
    """The two factors of data * factor, where the factor is 1/root * g: data * 1/root, and g. None for other factors.

    A factor that is smaller than the data is cheaper as it is. Of gate * (x * 1/root) the norm is x * 1/root.
    """
    if not is_known(factor.shape) or factor.shape != data.shape:
        return None
    for reciprocal, weights in factors(factor):
        if _is_reciprocal(reciprocal) and (known_tensor(weights) is not None or weights.shape != data.shape):
            normal = editor.before(node, "Mul", data, reciprocal, dtype=data.dtype)
            normal.shape = data.shape
            return normal, weights
    return None


def _is_reciprocal(value: ir.Value) -> bool:
    """Whether a value is one over another, or over its root."""
    node = made_by(value, "Reciprocal", "Div", "Pow")
    if node is None or node.op_type == "Reciprocal":
        return node is not None
    return constant(node.inputs[0]) == 1 if node.op_type == "Div" else constant(node.inputs[1]) == -0.5
