"""Removes views that are not needed: Reshapes of Reshapes, and nodes without effect.

Fusion leaves Reshapes where an operator takes three axes and the exporter wrote four. Nodes without effect are a Slice
of the whole, an Expand to the same sizes, and a Concat of all slices of a value. Each node costs some microseconds of
CPU time. Masks that differ only by such nodes can then be merged.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Sequence

import numpy as np
import numpy.typing as npt
import onnx_ir as ir

from splitc.compiler.graphs.editor import Editor
from splitc.compiler.graphs.matching import VIEWS, constant_numbers, is_onnx, value_before
from splitc.compiler.normal_form.constants import ANY_END
from splitc.compiler.patterns.sizes import Axis, Sizes

# A size in the graph: a number, or an expression of symbols.
Entry = int | ir.SymbolicDim


# How operators compute lists of sizes.
_COMPUTE: dict[str, Callable[..., npt.NDArray[np.object_]]] = {
    "Gather": lambda sizes, places: sizes[places.astype(int)],
    "Slice": lambda sizes, start, end, axis=(0,), step=(1,): sizes[start[0] : end[0] : step[0]],
    "Concat": lambda *lists: np.concatenate(lists),
    "Add": operator.add,
    "Sub": operator.sub,
    "Mul": operator.mul,
}


def join_views(editor: Editor, sizes: Sizes) -> None:
    """Make views read the source of the views before them, and bypass those without effect, in place.

    Nodes that nothing reads any more stay in the graph.
    """
    for node in [node for node in editor.graph if _is_view(node) or _keeps(node, sizes)]:
        made, sources = node.outputs[0], list(_sources(node, sizes))
        own = sizes.axes(made if _is_view(node) or not sources else sources[0])  # their symbols may differ
        restored = next((value for value in reversed(sources) if _are_same(sizes.axes(value), own)), None)
        if restored is not None and not made.is_graph_output():
            made.replace_all_uses_with(restored)
            continue
        for source in reversed(sources[1:]) if _is_view(node) else ():
            if (numbers := _shape_for(node, source, sizes)) is not None:
                node.replace_input_with(0, source)
                node.replace_input_with(1, editor.numbers(*numbers))
                break
    _join_parts(editor, sizes)


def _join_parts(editor: Editor, sizes: Sizes) -> None:
    """Bypass a Concat of all slices of a value, as between blocks of two streams (image and text)."""
    for node in list(editor.graph):
        joined = node.outputs[0]
        source = _source_of_parts(node, sizes) if is_onnx(node, "Concat") else None
        if source is not None and not joined.is_graph_output():
            joined.replace_all_uses_with(source)


def _source_of_parts(concat: ir.Node, sizes: Sizes) -> ir.Value | None:
    """The value whose consecutive slices are a Concat's inputs; None if there is none.

    Two slices need no known sizes: the end of the first is the start of the second.
    """
    makers = [None if value is None else value.producer() for value in concat.inputs]
    source = value_before(concat.inputs[0], "Slice")
    axes = None if source is None else sizes.axes(source)
    if source is None or not axes:
        return None
    at = concat.attributes.get_int("axis", 0) % len(axes)
    bounds = [None if maker is None else _part(maker, source, at, len(axes), sizes) for maker in makers]
    parts = [part for part in bounds if part is not None]
    if len(parts) != len(makers):
        return None
    ends: list[Entry] = [0, *(end for _, end in parts)]
    numbers = [end for end in ends[:-1] if isinstance(end, int)]
    in_order = len(parts) == 2 or (len(numbers) == len(parts) and numbers == sorted(numbers))
    follow = all(_is_equal(start, end) for (start, _), end in zip(parts, ends, strict=False))
    return source if follow and in_order and _is_end(ends[-1], axes[at]) else None


def _part(node: ir.Node, source: ir.Value, axis: int, rank: int, sizes: Sizes) -> tuple[Entry, Entry] | None:
    """The start and end of a Slice of `source` along `axis` alone; None for other nodes."""
    if not is_onnx(node, "Slice") or node.inputs[0] is not source or len(node.inputs) < 4:
        return None
    _, starts, ends, along, steps = (*node.inputs, None)[:5]
    bounds = [_computed(value, sizes) for value in (starts, ends, along)]
    is_by_one = steps is None or _computed(steps, sizes) == [1]
    if not is_by_one or any(entries is None or len(entries) != 1 for entries in bounds):
        return None
    (start,), (end,), (place,) = (entries or [] for entries in bounds)
    return (start, end) if isinstance(place, int) and place % rank == axis else None


def _are_same(axes: Sequence[Axis] | None, others: Sequence[Axis] | None) -> bool:
    """Whether axes have the same sizes, and no different symbols, as others."""
    if axes is None or others is None or len(axes) != len(others):
        return False
    return not any(axis.is_apart(other) for axis, other in zip(axes, others, strict=True))


def _is_view(node: ir.Node) -> bool:
    return is_onnx(node, *VIEWS)


def _keeps(node: ir.Node, sizes: Sizes) -> bool:
    """Whether a Slice takes all of its input, or an Expand repeats nothing, for all sizes."""
    if not is_onnx(node, "Slice", "Expand") or len(node.inputs) < 2 or node.inputs[0] is None:
        return False
    axes = sizes.axes(node.inputs[0])
    if axes is None or sizes.of(node.inputs[0]) != sizes.of(node.outputs[0]):
        return False
    return _repeats_nothing(node, axes, sizes) if node.op_type == "Expand" else _takes_all(node, axes, sizes)


def _repeats_nothing(node: ir.Node, axes: Sequence[Axis], sizes: Sizes) -> bool:
    """Whether an Expand has no effect in any request: its sizes are 1, missing, or the symbols of its input's axes.

    Equal sizes alone do not suffice: an axis of one element may be larger in another request.
    """
    wanted = _computed(node.inputs[1], sizes)
    pairs = zip(reversed(wanted or ()), reversed(axes), strict=False)
    return wanted is not None and all(size == 1 or _is_size_of(size, axis) for size, axis in pairs)


def _takes_all(node: ir.Node, axes: Sequence[Axis], sizes: Sizes) -> bool:
    """Whether a Slice takes all of its input in any request: each end is the symbol of the axis, or beyond any size.

    Equal sizes alone do not suffice: in another request a mask may be longer than the keys that it is sliced to.
    """
    _, starts, ends, along, steps = (*node.inputs, None, None)[:5]
    places = list(range(len(axes))) if along is None else constant_numbers(along)
    if (
        places is None
        or set(constant_numbers(starts) or ()) != {0}
        or not (steps is None or set(constant_numbers(steps) or ()) == {1})
    ):
        return False
    stops = _computed(ends, sizes)
    if stops is None or len(stops) != len(places):
        return False
    pairs = [(stop, axes[place]) for stop, place in zip(stops, places, strict=True)]
    return all(_is_end(stop, axis) for stop, axis in pairs)


def _is_end(stop: Entry, axis: Axis) -> bool:
    """Whether a Slice that stops there takes an axis to its end in any request."""
    return (isinstance(stop, int) and stop >= ANY_END) or _is_size_of(stop, axis)


def _is_size_of(size: Entry, axis: Axis) -> bool:
    """Whether a size is that of an axis in any request."""
    return axis.entry is not None and _is_equal(size, axis.entry)


def _is_equal(one: Entry, other: Entry) -> bool:
    """Whether two sizes are equal in any request, by their symbols."""
    if isinstance(one, int) or isinstance(other, int):
        return one == other
    return None not in (one.value, other.value) and (one - other).evaluate({}) == 0


def _computed(value: ir.Value | None, sizes: Sizes) -> Sequence[Entry] | None:
    """A value that is a list of sizes, as numbers and symbols; None if one of them is not known."""
    if (numbers := constant_numbers(value)) is not None:
        return numbers
    node = None if value is None else value.producer()
    if node is None or node.domain:
        return None
    if node.op_type == "Shape":
        axes = sizes.read_by(node)
        entries = [axis.entry for axis in axes or () if axis.entry is not None]
        return entries if axes is not None and len(entries) == len(axes) else None
    if node.op_type in VIEWS | {"Cast", "Identity"}:
        return _computed(node.inputs[0], sizes)
    lists = [_computed(part, sizes) for part in node.inputs] if node.op_type in _COMPUTE else []
    indices = lists[1:] if node.op_type in ("Gather", "Slice") else []
    if not lists or None in lists or not all(isinstance(n, int) for part in indices for n in part or ()):
        return None
    made: list[Entry] = _COMPUTE[node.op_type](*(np.array(part, object) for part in lists)).tolist()
    return made


def _sources(node: ir.Node | None, sizes: Sizes) -> Iterator[ir.Value]:
    """The input of a node that is a view or without effect, the input of such a node before it, and so on."""
    while node is not None and (_is_view(node) or _keeps(node, sizes)):
        value = node.inputs[0]
        if value is None or sizes.of(value) is None:
            return
        yield value
        node = value.producer()


def _shape_for(node: ir.Node, source: ir.Value, sizes: Sizes) -> list[int] | None:
    """The constant shape by which a Reshape of `source` gives the same result; None if there is none."""
    numbers = constant_numbers(node.inputs[1]) if node.op_type == "Reshape" else None
    if numbers is None or node.attributes.get_int("allowzero", False):
        return None
    old, new = (None if value is None else sizes.axes(value) for value in (node.inputs[0], source))
    assert old is not None and new is not None
    lost = [n for n, number in enumerate(numbers) if number == 0 and (n >= len(new) or old[n].is_apart(new[n]))]
    if len(lost) == 1 and numbers.count(0) == 1 and -1 not in numbers:
        numbers[lost.pop()] = -1  # only without other zeros: a copied size of 0 makes -1 ambiguous
    return None if lost else numbers
