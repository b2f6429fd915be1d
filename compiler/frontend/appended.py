"""Lists that a loop appends to, and that are stacked behind it, become what the loop stacks by itself: a scan output.

TorchScript writes so a module that lists the outputs of its steps. Of a list not even the number of axes is inferred,
so nothing behind it could be split.
"""

from __future__ import annotations

from dataclasses import dataclass

import onnx_ir as ir

from splitc.compiler.frontend.editor import Editor
from splitc.compiler.frontend.iterations import GOES_ON, LEADING
from splitc.compiler.frontend.matching import is_onnx, made_by


@dataclass(frozen=True)
class _List:
    """A state of a loop that is a list.

    - `place`: its number among the states.
    - `append`: the node that appends to it.
    - `item`, `rank`: what is appended, and its number of axes.
    - `stacks`: the nodes that stack the list.
    """

    place: int
    append: ir.Node
    item: ir.Value
    rank: int
    stacks: tuple[ir.Node, ...]


def stack_in_loops(graph: ir.Graph) -> None:
    """Replace the lists of loops by scan outputs, in place."""
    for loop in [node for node in graph if is_onnx(node, "Loop")]:
        lists = [one for place in range(len(loop.inputs) - LEADING) if (one := _list_of(loop, place)) is not None]
        if lists:
            _stack(loop, lists, Editor(graph))


def _list_of(loop: ir.Node, place: int) -> _List | None:
    """The state of a loop, if it begins empty, each iteration appends one item, and its readers only stack it."""
    body, made = loop.attributes["body"].as_graph(), loop.outputs[place]
    state, result = body.inputs[LEADING + place], body.outputs[GOES_ON + place]
    append = made_by(result, "SequenceInsert")
    if append is None or append.inputs[0] is not state or any(value is not None for value in append.inputs[2:]):
        return None
    is_only_appended = len(state.uses()) == 1 and not result.uses() and list(body.outputs).count(result) == 1
    starts_empty = made_by(loop.inputs[LEADING + place], "SequenceEmpty") is not None
    item, readers = append.inputs[1], tuple(node for node, _ in made.uses())
    if not is_only_appended or not starts_empty or made.is_graph_output() or item is None or item.shape is None:
        return None
    stacks = all(node.graph is loop.graph and _is_stack(node) for node in readers)
    return _List(place, append, item, len(item.shape), readers) if stacks else None


def _is_stack(node: ir.Node) -> bool:
    return is_onnx(node, "ConcatFromSequence") and node.attributes.get_int("new_axis", 0) == 1


def _stack(loop: ir.Node, lists: list[_List], editor: Editor) -> None:
    """Replace a loop by one that stacks the items of these lists, in place."""
    body, places = loop.attributes["body"].as_graph(), {one.place for one in lists}
    for one in sorted(lists, key=lambda one: -one.place):
        del body.inputs[LEADING + one.place], body.outputs[GOES_ON + one.place]
    for one in lists:
        item = editor.before(one.append, "Identity", one.item)
        item.type, item.shape = one.item.type, one.item.shape
        body.outputs.append(item)
        body.remove(one.append, safe=True)
    inputs = [value for number, value in enumerate(loop.inputs) if number - LEADING not in places]
    attributes = list(loop.attributes.values())
    new = ir.Node("", "Loop", inputs, attributes, num_outputs=len(loop.outputs), name=loop.name)
    editor.graph.insert_before(loop, new)
    kept = [value for number, value in enumerate(loop.outputs) if number not in places]
    for one, stacked in zip(lists, new.outputs[len(kept) :], strict=True):
        for node in one.stacks:
            _put(node, stacked, one, editor)
    ir.convenience.replace_nodes_and_values(editor.graph, loop, [loop], [], kept, new.outputs[: len(kept)])


def _put(node: ir.Node, stacked: ir.Value, one: _List, editor: Editor) -> None:
    """Put a scan output, which is stacked along the first axis, in the place of a list that a node stacks."""
    axis = node.attributes.get_int("axis", 0) % (one.rank + 1)
    order = [*range(1, axis + 1), 0, *range(axis + 1, one.rank + 1)]
    editor.replace(node, ir.node("Transpose", [stacked], {"perm": order}, name=node.name))
