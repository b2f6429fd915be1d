"""Replaces repeat_interleave with one number of repeats, as torch's older exporter writes it, by a Reshape.

Along an axis of unknown size it writes a list of equal numbers of repeats, expands each element to the largest of them,
and picks elements by a mask (NonZero, GatherND). The mask is true everywhere, but sizes seem to depend on data.
"""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from splitc.compiler.graphs.editor import Editor
from splitc.compiler.graphs.matching import (
    constant_numbers,
    filled_with,
    is_onnx,
    made_by,
    source_through,
    value_before,
)
from splitc.compiler.inference.symbolic import Shapes, shapes_by_onnx
from splitc.compiler.nodes import inputs_of

# What gives equal numbers if all that it reads are equal numbers.
ELEMENTWISE = ("Add", "Sub", "Mul", "Div", "Cast", "Identity", "Max", "Min", "Neg")
EXTREMES = ("ReduceMax", "ReduceMin")


def reshape_repeats(model: ir.Model) -> None:
    """Replace repeats whose numbers are all equal, in place."""
    picks = [node for node in model.graph if is_onnx(node, "GatherND")]
    masks = {node: mask for node in picks if (mask := _mask_of(node)) is not None}
    if not masks:
        return
    shapes, editor = shapes_by_onnx(model), Editor(model.graph)
    for node, mask in masks.items():
        if _counts_all(mask, shapes) and (shape := shapes.get(mask.name)) is not None:
            _reshape(node, mask, shape.rank(), editor)
    for node in [node for node in model.graph if is_onnx(node, *EXTREMES)]:
        _replace_extreme(node, shapes, editor)


def _mask_of(pick: ir.Node) -> ir.Value | None:
    """The mask of the elements that a GatherND picks; None if it picks others."""
    places = made_by(pick.inputs[1], "Transpose")
    is_transposed = places is not None and list(places.attributes.get_ints("perm", (1, 0))) == [1, 0]
    if not is_transposed or pick.attributes.get_int("batch_dims", 0) != 0:
        return None
    return value_before(value_before(pick.inputs[1], "Transpose"), "NonZero")


def _counts_all(mask: ir.Value, shapes: Shapes) -> bool:
    """Whether a mask is true everywhere: numbers from 0 on, below the largest of equal ones, are less than these."""
    less = made_by(mask, "Less")
    counted = None if less is None else made_by(less.inputs[0], "Range")
    if less is None or counted is None or counted.inputs[1] is None:
        return False
    start, limit, step = counted.inputs[0], source_through(counted.inputs[1], "Cast", "Identity"), counted.inputs[2]
    largest, repeats = made_by(limit, *EXTREMES), value_before(less.inputs[1], "Unsqueeze")
    if largest is None or repeats is None or largest.inputs[0] is not repeats:
        return False
    return constant_numbers(start) == [0] and constant_numbers(step) == [1] and _is_equal(repeats, shapes)


def _is_equal(value: ir.Value | None, shapes: Shapes) -> bool:
    """Whether all elements of a value are equal."""
    if value is None or _is_single(value, shapes) or made_by(value, "ConstantOfShape") is not None:
        return value is not None
    node = made_by(value, *ELEMENTWISE)
    return node is not None and all(_is_equal(read, shapes) for read in node.inputs)


def _is_single(value: ir.Value, shapes: Shapes) -> bool:
    """Whether a value has one element and no axes."""
    shape = shapes.get(value.name)
    return shape is not None and shape.rank() == 0


def _reshape(node: ir.Node, mask: ir.Value, axes: int, editor: Editor) -> None:
    """Replace a GatherND that picks all of the mask's elements: the first axes of the data, one after the other."""
    data, first, end = node.inputs[0], editor.numbers(*[0] * axes), np.iinfo(np.int64).max
    picked = editor.before(node, "Slice", data, first, editor.before(node, "Shape", mask))
    rest = editor.before(node, "Slice", editor.before(node, "Shape", data), *map(editor.numbers, (axes, end)))
    shape = editor.before(node, "Concat", editor.numbers(-1), rest, axis=0)
    editor.replace(node, ir.node("Reshape", [picked, shape]))


def _replace_extreme(node: ir.Node, shapes: Shapes, editor: Editor) -> None:
    """Replace the largest or smallest of equal numbers by one of them."""
    reduced, is_whole = node.inputs[0], len(node.inputs) == 1 and "axes" not in node.attributes
    if not is_whole or node.attributes.get_int("keepdims", 1) != 0 or node.outputs[0].is_graph_output():
        return
    if reduced is not None and not _is_single(reduced, shapes) and _is_equal(reduced, shapes):
        node.outputs[0].replace_all_uses_with(_element(reduced, node, shapes, editor))


def _element(value: ir.Value, at: ir.Node, shapes: Shapes, editor: Editor) -> ir.Value:
    """An element of a value whose elements are equal, computed before a node."""
    maker = value.producer()
    if maker is None or _is_single(value, shapes):
        return value
    if maker.op_type == "ConstantOfShape":
        return editor.constant(filled_with(maker))
    read = [_element(one, at, shapes, editor) for one in inputs_of(maker)]
    made = ir.node(maker.op_type, read, attributes=maker.attributes)
    at.prepend(made)
    return made.outputs[0]
