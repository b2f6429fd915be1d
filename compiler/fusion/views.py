"""Reshapes that fusion leaves behind each other: an operator takes three axes where the exporter wrote four.

So also what keeps its input as it is: a Slice of the whole, an Expand to the same sizes. Each is a node that an engine
runs, and takes some microseconds of the host's time. Masks that differ only in such nodes are one without them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import chain
from operator import add, mul, sub

import numpy as np
import onnx_ir as ir

from splitc.compiler.frontend.editor import Editor
from splitc.compiler.frontend.walks import producers, reached
from splitc.compiler.fusion.lengths import sizes_read
from splitc.compiler.fusion.operand import VIEWS
from splitc.compiler.fusion.sizes import Axis, Size, Sizes


def _by_entry(combine: Callable[[int, int], int], one: Sequence[int], other: Sequence[int]) -> list[int]:
    """Two lists, or a list and a number, entry by entry."""
    return [combine(*pair) for pair in zip(*np.broadcast_arrays(one, other), strict=True)]


# What gives other sizes from sizes, so that lists which are equal for two sets of sizes are equal for all. A Min or a
# Max may be another one of its inputs for longer requests.
LINEAR = VIEWS | {"Shape", "Gather", "Slice", "Concat", "Add", "Sub", "Mul", "Cast", "Identity"}
# What they compute of lists of sizes.
_COMPUTE: dict[str, Callable[..., list[int]]] = {
    "Gather": lambda sizes, places: [sizes[place] for place in places],
    "Slice": lambda sizes, start, end, axis=(0,), step=(1,): sizes[start[0] : end[0] : step[0]],
    "Concat": lambda *lists: list(chain(*lists)),
    **{name: partial(_by_entry, combine) for name, combine in (("Add", add), ("Sub", sub), ("Mul", mul))},
}
# An end of a Slice from which on it is that of any axis.
ANY_END = 1 << 31


def join_views(editor: Editor, sizes: Sizes) -> None:
    """Let views read what other views are made of, and drop those that give it back as it was, in place.

    What nothing reads any more stays. Nothing is done unless sizes can be told apart.
    """
    if not sizes.differ:
        return
    for node in [node for node in editor.graph if _is_view(node) or _keeps(node, sizes)]:
        made, own = node.outputs[0], sizes.of(node.outputs[0])
        sources = list(_sources(node, sizes))
        restored = next((value for value in reversed(sources) if sizes.of(value) == own), None)
        if restored is not None and not made.is_graph_output():
            made.replace_all_uses_with(restored)
            continue
        for source in reversed(sources[1:]) if _is_view(node) else ():
            if (numbers := _shape_for(node, source, sizes)) is not None:
                node.replace_input_with(0, source)
                node.replace_input_with(1, editor.constant(np.array(numbers, np.int64)))
                break


def _is_view(node: ir.Node) -> bool:
    return node.op_type in VIEWS and not node.domain


def _keeps(node: ir.Node, sizes: Sizes) -> bool:
    """Whether a Slice takes all of its input, or an Expand repeats nothing, whatever the sizes are."""
    if node.op_type not in ("Slice", "Expand") or node.domain or len(node.inputs) < 2 or node.inputs[0] is None:
        return False
    axes = sizes.axes(node.inputs[0])
    if axes is None or sizes.of(node.inputs[0]) != sizes.of(node.outputs[0]):
        return False
    return _is_linear(node.inputs[1]) if node.op_type == "Expand" else _takes_all(node, axes, sizes)


def _takes_all(node: ir.Node, axes: Sequence[Axis], sizes: Sizes) -> bool:
    """Whether a Slice, which takes as many elements as there are for two sets of sizes, does so for all.

    An end that is computed is where the axis ends. One beyond may cut longer axes, as of what was read in steps.
    """
    _, starts, ends, along, steps = (*node.inputs, None, None)[:5]
    places = list(range(len(axes))) if along is None else _numbers(along)
    if places is None or set(_numbers(starts) or ()) != {0} or not (steps is None or set(_numbers(steps) or ()) == {1}):
        return False
    stops = _numbers(ends)
    if stops is None:
        return (computed := _computed(ends, sizes)) is not None and computed == [axes[place].size for place in places]
    return all(stop >= ANY_END or axes[place].fixed == stop for stop, place in zip(stops, places, strict=False))


def _numbers(value: ir.Value | None) -> list[int] | None:
    """The numbers of a constant list; None if it is none."""
    return None if value is None or value.const_value is None else value.const_value.numpy().tolist()


def _computed(value: ir.Value | None, sizes: Sizes) -> list[Size] | None:
    """A list of sizes that LINEAR operators compute, with both sets of sizes; None if something else is among them."""
    if value is None or value.const_value is not None:
        numbers = _numbers(value)
        return None if numbers is None else [(number, number) for number in np.ravel(numbers).tolist()]
    node = value.producer()
    if node is None or node.domain or node.op_type not in LINEAR:
        return None
    if node.op_type == "Shape":
        axes = sizes_read(node, sizes)
        return None if axes is None else [axis.size for axis in axes]
    if node.op_type in VIEWS | {"Cast", "Identity"}:
        return _computed(node.inputs[0], sizes)
    lists = [_computed(part, sizes) for part in node.inputs]
    if any(part is None for part in lists):
        return None
    both = [_COMPUTE[node.op_type](*([pair[way] for pair in part or ()] for part in lists)) for way in (0, 1)]
    return list(zip(*both, strict=True))


def _is_linear(value: ir.Value | None) -> bool:
    """Whether a list of sizes is computed by what is LINEAR."""
    above = list(reached(producers([value]), lambda node: () if node.op_type == "Shape" else producers(node.inputs)))
    read = [value, *(one for node in above if node.op_type != "Shape" for one in node.inputs)]
    is_fed = any(one is not None and one.producer() is None and one.const_value is None for one in read)
    return not is_fed and all(node.op_type in LINEAR and not node.domain for node in above)


def _sources(node: ir.Node | None, sizes: Sizes) -> Iterator[ir.Value]:
    """What a view, or what keeps its input, reads, and what that is a view of, as far as the sizes are known."""
    while node is not None and (_is_view(node) or _keeps(node, sizes)):
        value = node.inputs[0]
        if value is None or sizes.of(value) is None:
            return
        yield value
        node = value.producer()


def _shape_for(node: ir.Node, source: ir.Value, sizes: Sizes) -> list[int] | None:
    """The sizes by which a Reshape makes the same of a source; None if no constant says them."""
    shape = node.inputs[1].const_value if node.op_type == "Reshape" and node.inputs[1] is not None else None
    if shape is None or node.attributes.get_int("allowzero", False):
        return None
    old, new = (None if value is None else sizes.of(value) for value in (node.inputs[0], source))
    assert old is not None and new is not None
    numbers: list[int] = shape.numpy().tolist()
    lost = [n for n, number in enumerate(numbers) if number == 0 and not (n < len(new) and old[n] == new[n])]
    if len(lost) == 1 and numbers.count(0) == 1 and -1 not in numbers:
        numbers[lost.pop()] = -1  # with a size that is kept, which may be 0, it could not be found
    return None if lost else numbers
