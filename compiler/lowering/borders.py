"""Values that enter or leave an island: shards are joined into the whole value, or sliced out of it.

An island is a node that is sharded along another axis than the nodes around it.
"""

from __future__ import annotations

from collections.abc import Collection

import onnx_ir as ir

from splitc.compiler.graphs.origins import note_sizes, noted_sizes
from splitc.compiler.lowering.rank_forms import RankEditor, sum_over_ranks, summed_type
from splitc.compiler.operators import axes as ax
from splitc.compiler.operators.axes import Axis, Factor
from splitc.compiler.operators.operation import SUMMED
from splitc.compiler.sharding.crossings import Crossing
from splitc.compiler.sharding.shards import Shards
from splitc.compiler.sharding.shares import Range

# The first opset whose Pad takes 8-bit integers.
PADS_INTEGERS = 13


def enter(editor: RankEditor, node: ir.Node, crossing: Crossing) -> None:
    """Replace an input of an island's node by the shard that the node needs, in place."""
    if crossing.is_joined(editor.shards.ranges) or crossing.is_cut(editor.shards.ranges):
        assert crossing.place is not None
        value = node.inputs[crossing.place]
        assert value is not None
        copy = editor.before(node, "Identity", value)
        # The name of a joined value must be the same on all ranks.
        copy.name, copy.type, copy.shape = f"{node.outputs[0].name}/input{crossing.place}", value.type, value.shape
        note_sizes(copy, noted_sizes(value))
        node.replace_input_with(crossing.place, copy)
        leave(editor, copy, crossing)


def leave(editor: RankEditor, value: ir.Value, crossing: Crossing) -> None:
    """Make all readers of an island's result read the shard that they need, in place."""
    if crossing.is_joined(editor.shards.ranges):
        value = _join(editor, value, crossing)
    if crossing.is_cut(editor.shards.ranges):
        _cut(editor, value, crossing)


def _join(editor: RankEditor, value: ir.Value, crossing: Crossing) -> ir.Value:
    """Join shards into the whole value: an all-reduce of shards that are padded with zeros.

    A rank whose shard is a copy of another rank's adds only zeros. Types that can't be summed are cast, and 8-bit
    integers if the opset can't pad them.
    """
    present = {atom for side in crossing.sides for atom in ax.atoms(side.before)}
    runs = {side.number: _run(editor.shards, side.before, present) for side in crossing.sides}
    sizes = {side.number: ax.size_of(side.before) for side in crossing.sides}
    _resize(value, {number: run.size for number, run in runs.items()})
    kind = value.dtype or ir.DataType.FLOAT
    pads = kind in SUMMED and editor.graph.opset_imports.get("", 17) >= PADS_INTEGERS
    if (summed := kind if pads else summed_type(kind)) != kind:
        value = editor.wrap(value, "Cast", [value], "narrow", summed, to=summed)
    if replicas := [number for number, run in runs.items() if not run.owned]:
        value = _slice(editor, value, {replicas[0]: Range(0, 0)}, "replica")
        runs[replicas[0]] = Range(0, 0)
    around = {number: (run.start, sizes[number] - run.stop) for number, run in runs.items()}
    value = sum_over_ranks(editor, _pad(editor, value, around, crossing.axes))
    _resize(value, sizes)
    return value if summed == kind else editor.wrap(value, "Cast", [value], "wide", kind, to=kind)


def _cut(editor: RankEditor, value: ir.Value, crossing: Crossing) -> None:
    """Slice the rank's shard out of the whole value."""
    runs = {side.number: _run(editor.shards, side.after) for side in crossing.sides}
    sizes = {side.number: ax.size_of(side.after) for side in crossing.sides}
    _slice(editor, value, {number: run for number, run in runs.items() if run.size < sizes[number]}, "whole")


def _run(shards: Shards, axis: Axis, present: Collection[Factor] = ()) -> Range:
    """The rank's elements along an axis of a value with these atoms. Only the axis' first factor can be sharded."""
    leaves = ax.leaves(axis)
    if not leaves:
        return Range(0, ax.size_of(axis))
    rest = ax.size_of(tuple(leaves[1:]))
    own = shards.ranges.get(leaves[0], Range(0, leaves[0].size))
    return Range(own.start * rest, own.stop * rest, own.is_owned(present))


def _slice(editor: RankEditor, value: ir.Value, runs: dict[int, Range], suffix: str) -> ir.Value:
    """A value sliced to ranges of elements, by the number of the axis."""
    if not runs:
        return value
    starts, ends = [run.start for run in runs.values()], [run.stop for run in runs.values()]
    bounds, attributes = editor.lists("Slice", starts=starts, ends=ends, axes=list(runs))
    cut = editor.wrap(value, "Slice", [value, *bounds], suffix, **attributes)
    _resize(cut, {number: run.size for number, run in runs.items()})
    return cut


def _pad(editor: RankEditor, value: ir.Value, pads: dict[int, tuple[int, int]], axes: int) -> ir.Value:
    """A value padded with zeros: `pads` are the numbers of zeros before and after it, by axis."""
    pairs = [pads.get(number, (0, 0)) for number in range(axes)]
    flat = [first for first, _ in pairs] + [last for _, last in pairs]
    sizes, attributes = editor.lists("Pad", pads=flat)
    return editor.wrap(value, "Pad", [value, *sizes], "shard", **attributes)


def _resize(value: ir.Value, sizes: dict[int, int]) -> None:
    """Set sizes, by axis, in a value's shape and noted sizes: both were copied from the value that it replaces."""
    value.shape = _with_sizes(value.shape, sizes)
    note_sizes(value, _with_sizes(noted_sizes(value), sizes))


def _with_sizes(shape: ir.Shape | None, sizes: dict[int, int]) -> ir.Shape | None:
    return None if shape is None else ir.Shape([sizes.get(number, size) for number, size in enumerate(shape)])
