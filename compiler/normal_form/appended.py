"""Lists that a loop appends to, and that are stacked behind it, become what the loop stacks by itself: a scan output.

TorchScript writes so a module that lists the outputs of its steps, and torch's newer exporter an EmbeddingBag: it joins
the row of each bag. Of a list not even the number of axes is inferred, so nothing behind it could be split.
"""

from __future__ import annotations

from dataclasses import dataclass

import onnx_ir as ir

from splitc.compiler.graphs.editor import Editor
from splitc.compiler.graphs.matching import is_onnx, made_by
from splitc.compiler.inference.iterations import GOES_ON, LEADING
from splitc.compiler.inference.symbolic import Shapes, inner_shapes


@dataclass(frozen=True)
class _List:
    """A state of a loop that is a list.

    - `place`: its number among the states.
    - `append`: the node that appends to it.
    - `item`, `shape`: what is appended, and its shape.
    - `stacks`: the nodes that stack the list, or join items with one element along an axis there.
    """

    place: int
    append: ir.Node
    item: ir.Value
    shape: ir.Shape
    stacks: tuple[ir.Node, ...]


def stack_in_loops(model: ir.Model) -> None:
    """Replace the lists of loops by scan outputs, in place."""
    loops = [node for node in model.graph if is_onnx(node, "Loop")]
    if not any(is_onnx(node, "ConcatFromSequence") for node in model.graph) or not loops:
        return
    shapes = inner_shapes(model)
    for loop in loops:
        places = range(len(loop.inputs) - LEADING)
        if lists := [one for place in places if (one := _list_of(loop, place, shapes)) is not None]:
            _stack(loop, lists, Editor(model.graph))


def _list_of(loop: ir.Node, place: int, shapes: Shapes) -> _List | None:
    """The state of a loop, if it begins empty, each iteration appends one item, and its readers only stack it."""
    body, made = loop.attributes["body"].as_graph(), loop.outputs[place]
    state, result = body.inputs[LEADING + place], body.outputs[GOES_ON + place]
    append = made_by(result, "SequenceInsert")
    if append is None or append.inputs[0] is not state or any(value is not None for value in append.inputs[2:]):
        return None
    is_only_appended = len(state.uses()) == 1 and not result.uses() and list(body.outputs).count(result) == 1
    starts_empty = made_by(loop.inputs[LEADING + place], "SequenceEmpty") is not None
    item, readers = append.inputs[1], tuple(node for node, _ in made.uses())
    if not is_only_appended or not starts_empty or made.is_graph_output() or item is None:
        return None
    shape = _shape_of(item, shapes)
    if shape is None or not all(node.graph is loop.graph and _is_stack(node, shape) for node in readers):
        return None
    return _List(place, append, item, shape, readers)


def _shape_of(item: ir.Value, shapes: Shapes) -> ir.Shape | None:
    """The shape of what is appended. Sizes of a row that one branch of an If knows hold for both: rows are joined."""
    shape, made = shapes.get(item.name, item.shape), made_by(item, "If")
    for branch in [] if made is None else made.attributes.values():
        other = branch.as_graph().outputs[0].shape
        if shape is not None and other is not None and len(other) == len(shape):
            pairs = zip(shape[1:], other[1:], strict=True)
            shape = ir.Shape([*shape[:1], *(one if isinstance(one, int) else two for one, two in pairs)])
    return shape


def _is_stack(node: ir.Node, shape: ir.Shape) -> bool:
    """Whether a node stacks items of this shape, or joins items of one row, of which all but one size are known."""
    if not is_onnx(node, "ConcatFromSequence"):
        return False
    is_row = len(shape) > 0 and shape[0] == 1 and _row(shape).count(-1) <= 1
    return _adds_axis(node) or (is_row and node.attributes["axis"].as_int() in (0, -len(shape)))


def _row(shape: ir.Shape) -> list[int]:
    """The sizes of a row, behind the first axis; -1 for those that are not known."""
    return [size if isinstance(size, int) else -1 for size in shape[1:]]


def _adds_axis(node: ir.Node) -> bool:
    return node.attributes.get_int("new_axis", 0) == 1


def _stack(loop: ir.Node, lists: list[_List], editor: Editor) -> None:
    """Replace a loop by one that stacks the items of these lists, in place."""
    body, places = loop.attributes["body"].as_graph(), {one.place for one in lists}
    for one in sorted(lists, key=lambda one: -one.place):
        body.inputs.pop(LEADING + one.place)  # `del` would leave the values marked as inputs and outputs
        body.outputs.pop(GOES_ON + one.place)
    for one in lists:
        item, result = editor.before(one.append, "Identity", one.item), one.append.outputs[0]
        item.name, result.name = result.name, None  # names of its own might be those of values outside
        item.type, item.shape = one.item.type, one.shape
        body.outputs.append(item)
        body.remove(one.append, safe=True)
    inputs = [value for number, value in enumerate(loop.inputs) if number - LEADING not in places]
    attributes = list(loop.attributes.values())
    new = ir.Node("", "Loop", inputs, attributes, num_outputs=len(loop.outputs), name=loop.name)
    loop.prepend(new)
    kept = [value for number, value in enumerate(loop.outputs) if number not in places]
    for one, stacked in zip(lists, new.outputs[len(kept) :], strict=True):
        for node in one.stacks:
            _put(node, stacked, one, editor)
    ir.convenience.replace_nodes_and_values(editor.graph, loop, [loop], [], kept, new.outputs[: len(kept)])


def _put(node: ir.Node, stacked: ir.Value, one: _List, editor: Editor) -> None:
    """Put a scan output, which is stacked along the first axis, in the place of a list that a node stacks or joins."""
    if _adds_axis(node):
        rank = len(one.shape) + 1
        axis = node.attributes["axis"].as_int() % rank
        order = [*range(1, axis + 1), 0, *range(axis + 1, rank)]
        new = ir.node("Transpose", [stacked], {"perm": order}, name=node.name)
    else:
        new = ir.node("Reshape", [stacked, editor.numbers(0, *_row(one.shape))], name=node.name)
    editor.replace(node, new)
