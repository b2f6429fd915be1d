"""Operators that rearrange: reshape, transpose, concatenate, slice, repeat."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import onnx_ir as ir

from splitc.compiler.operators import axes as ax
from splitc.compiler.operators.axes import Axis
from splitc.compiler.operators.operation import LINEAR, Operation
from splitc.compiler.operators.operator import Operator
from splitc.compiler.operators.row_groups import grouped_scratch

# An end beyond any axis.
WHOLE = 2**31 - 1


def _merged(axes: Sequence[Axis]) -> list[Axis]:
    """All axes merged into one, or into one for each run of axes between those of unknown size."""
    merged: list[Axis] = [()]
    for axis in axes:
        if ax.is_unknown(axis):
            merged.append(())
        else:
            merged[-1] += axis
    return merged


def reshape(op: Operation) -> None:
    """The elements keep their order: the axes of both sides, each merged into one product of factors, are the same.

    Runs of axes between axes of unknown size are related if all pairs have equal numbers of elements.
    """
    read, made = _merged(op.input(0)), _merged(op.output())
    if len(read) == len(made) == 1 or list(map(ax.size_of, read)) == list(map(ax.size_of, made)):
        op.relate_all(read, made)
    else:
        op.whole([*op.input(0), *op.output()], ax.UNKNOWN.reason)
    op.free([*op.input(0), *op.output()])
    op.linear = LINEAR
    if op.node.op_type == "Reshape":
        op.declare_sizes(1, op.output())


def squeeze(op: Operation) -> None:
    reshape(op)
    if not op.has(1) and op.numbers_of("axes") is None:
        op.whole((axis for axis in op.input(0) if axis), "it would drop the axis on a rank with one element of it")


def transpose(op: Operation) -> None:
    order = op.numbers_of("perm") or list(reversed(range(len(op.input(0)))))
    op.relate_all([op.input(0)[axis] for axis in order], op.output())
    op.linear = LINEAR


def expand(op: Operation) -> None:
    """A broadcast axis is new, and related to no other. The given sizes may be those of the last axes only."""
    op.broadcast(op.input(0), op.output())
    op.free(op.output())
    count = ax.size_of(op.input(1)[0])
    op.declare_sizes(1, op.output()[max(0, len(op.output()) - count) :])
    op.linear = LINEAR


def tile(op: Operation) -> None:
    counts: list[Axis] = []
    for source, target in zip(op.input(0), op.output(), strict=True):
        count = ax.new_axis(ax.size_of(target) // max(1, ax.size_of(source)))
        op.relate(target, (*count, *source))
        op.free([source])
        counts.append(count)
    op.declare_sizes(1, counts)
    op.linear = LINEAR


def constant_of_shape(op: Operation) -> None:
    op.free(op.output())
    op.declare_sizes(0, op.output())


def join(op: Operation, values: Sequence[int]) -> None:
    """Relate the inputs with these indices as sections of the axis along which they are concatenated."""
    joined = op.number("axis", 0) % max(1, len(op.output()))
    sections = op.cut(op.output()[joined], [ax.size_of(op.input(number)[joined]) for number in values])
    for number, section in zip(values, sections, strict=True):
        axes = op.input(number)
        op.relate_all([*axes[:joined], *axes[joined + 1 :]], [*op.output()[:joined], *op.output()[joined + 1 :]])
        op.relate(axes[joined], section)


def concat(op: Operation) -> None:
    join(op, range(len(op.inputs)))
    op.linear = (frozenset(range(len(op.inputs))),)


def split(op: Operation) -> None:
    axis = op.number("axis", 0) % len(op.input(0))
    sizes = [ax.size_of(op.output(number)[axis]) for number in range(len(op.outputs))]
    sections = op.cut(op.input(0)[axis], sizes)
    for number, section in enumerate(sections):
        op.relate(section, op.output(number)[axis])
        op.relate_others([axis], number)
    if op.has(1):
        op.declare_sizes(1, sections)
    elif op.numbers_of("split"):
        op.attributes["split"] = sections
    else:
        op.splits_evenly = True
    op.linear = LINEAR


def slice_(op: Operation) -> None:
    op.linear = LINEAR
    source, target = op.input(0), op.output()
    starts, ends = op.entries(1, "starts"), op.entries(2, "ends")
    named = op.has(3) or op.numbers_of("axes") is not None
    axes = op.numbers(3, "axes") if named else None if starts is None else list(range(len(starts)))
    if axes is None:
        return
    sliced = [axis % len(source) for axis in axes]
    kept = [axis for axis in range(len(source)) if axis not in sliced]
    op.relate_all([source[axis] for axis in kept], [target[axis] for axis in kept])
    steps = op.numbers(4) if op.has(4) else [1] * len(axes)
    if starts is None or steps is None:
        return
    bounds = [_slice_axis(op, *bound) for bound in zip(sliced, starts, ends or [None] * len(axes), steps, strict=True)]
    before, until = [start for start, _ in bounds], [end for _, end in bounds]
    if op.numbers_of("starts") is not None:
        op.attributes.update(starts=before, ends=until)
    else:
        op.declare_sizes(1, before)
        op.declare_sizes(2, until)


def _same_axis(op: Operation, place: int) -> Axis | None:
    """Relate an axis to a slice up to a computed end, if both have one symbol, so that it is whole in any request.

    Returns the axis whose size that end is; None if it may be shorter.
    """
    shapes = [None if value is None else value.shape for value in (op.node.inputs[0], op.node.outputs[0])]
    before, after = (None if shape is None else shape[place] for shape in shapes)
    if not isinstance(before, ir.SymbolicDim) or before.value is None or before != after:
        return None
    op.relate(op.input(0)[place], op.output()[place])
    return op.input(0)[place]


def _slice_axis(
    op: Operation, place: int, start: int | None, end: int | None, step: int
) -> tuple[Axis | None, Axis | None]:
    """Relate the axis at `place` to a slice of it: a section, or the major factor if it is strided.

    With unknown bounds it is neither, but may be whole.

    Returns the axes whose sizes `start` and `end` are, those behind them for bounds that count from the end; None for a
    bound that does not depend on the rank.
    """
    source, target = op.input(0)[place], op.output()[place]
    if end is None and (start, step) == (0, 1):
        return None, _same_axis(op, place)
    if start is None or end is None:
        return None, None
    size = ax.size_of(source)
    first, last = (min(max(bound + size if bound < 0 else bound, 0), size) for bound in (start, end))
    whole = source if end == size else None
    if step == 1 and (first, last) == (0, size):
        op.relate(source, target)
        return None, whole
    if step == 1 and first < last:
        head, middle, tail = op.cut(source, [first, last - first, size - last])
        op.relate(middle, target)
        before = head if start >= 0 else ax.joined(middle, tail)
        return before, None if end > size else ax.joined(head, middle) if end >= 0 else tail
    if step > 1 and size % step == 0 and max(first, -start) < step and ax.size_of(target) == size // step:
        stride = ax.new_axis(step)
        op.relate(source, (*target, *stride))
        op.free([target])
        op.whole([stride], "it selects elements with a stride")
        return None, whole
    return None, None


def pad(op: Operation) -> None:
    """Axes without padding are the same. An axis that is padded by -1 and 1 has the same size, but is shifted."""
    if (pads := _pads(op)) is not None:
        op.relate_others({place for place, *ends in pads if ends != [0, 0]})


def _pads(op: Operation) -> list[tuple[int, int | None, int | None]] | None:
    """The number of each padded axis, and its padding before and after, None where that depends on sizes."""
    pads, rank = op.entries(1, "pads"), len(op.input(0))
    places = op.numbers(3) if op.has(3) else range(rank)
    if pads is None or places is None:
        return None
    ends = zip(places, pads, pads[len(places) :], strict=False)
    return [(place % rank, first, last) for place, first, last in ends]


def pad_amounts(op: Operation, number: int) -> Any:
    """Example padding: where it depends on sizes, all of it is after the axis' elements."""
    if number != 1 or (pads := _pads(op)) is None:
        return None
    before = [first or 0 for _, first, _ in pads]
    more = [ax.size_of(op.output()[place]) - ax.size_of(op.input(0)[place]) for place, _, _ in pads]
    return [*before, *(m - b if end is None else end for m, b, (_, _, end) in zip(more, before, pads, strict=True))]


def resize(op: Operation) -> None:
    """Batch and channels are the same. Resized axes are needed whole."""
    for source, target in zip(op.input(0)[:2], op.output()[:2], strict=True):
        if ax.size_of(source) == ax.size_of(target):
            op.relate(source, target)
    rank = len(op.output())
    op.declare_sizes(3, [op.output()[place % rank] for place in op.numbers_of("axes") or range(rank)])


def shape(op: Operation) -> None:
    """A rank reads the sizes of its own shard. `SizeRewriter` corrects them where whole sizes are needed."""
    op.free(op.input(0))


def slice_bounds(op: Operation, number: int) -> Any:
    """Example starts, ends and steps: those that give the result's sizes, else whole axes."""
    target, rank = op.outputs[0], len(op.input(0))
    axes = op.numbers(3) if op.has(3) else list(range(rank))
    steps = op.numbers(4) if op.has(4) else [1]
    if number not in (1, 2) or target is None or axes is None or steps is None or {*steps} != {1}:
        return {1: 0, 2: WHOLE, 4: 1}.get(number)
    lengths = [(ax.size_of(op.input(0)[axis]), ax.size_of(target[axis])) for axis in axes]
    if number == 1:  # before the given ends, if the starts follow from a size
        until = [slice(end).indices(size)[1] for end, (size, _) in zip(op.numbers(2) or (), lengths, strict=False)]
        return [max(end - left, 0) for end, (_, left) in zip(until, lengths, strict=False)] or 0
    starts = op.numbers(1) or [0] * len(axes)
    cut = (WHOLE if size == left else start + left for start, (size, left) in zip(starts, lengths, strict=False))
    return [min(end, WHOLE) for end in cut] if min(starts) >= 0 else WHOLE


OPERATORS = (
    Operator("Reshape", reshape, is_view=True, shape_arithmetic=True, passes_sizes=True, rearranges=True),
    Operator("Flatten", reshape, is_view=True, shape_arithmetic=True, rearranges=True),
    Operator("Squeeze", squeeze, is_view=True, shape_arithmetic=True, passes_sizes=True, rearranges=True),
    Operator("Unsqueeze", reshape, is_view=True, shape_arithmetic=True, passes_sizes=True, rearranges=True),
    Operator("Transpose", transpose, shape_arithmetic=True, rearranges=True),
    Operator("Expand", expand, shape_arithmetic=True, expands=True, rearranges=True),
    Operator("Tile", tile, shape_arithmetic=True, expands=True, rearranges=True),
    Operator("ConstantOfShape", constant_of_shape, shape_arithmetic=True, expands=True),
    Operator(
        "Concat",
        concat,
        shape_arithmetic=True,
        passes_sizes=True,
        rearranges=True,
        half_scratch=grouped_scratch,
        single_scratch=grouped_scratch,
    ),
    Operator("Split", split, shape_arithmetic=True, rearranges=True, sizes_are_offsets=True),
    Operator(
        "Slice",
        slice_,
        reads_part=True,
        shape_arithmetic=True,
        passes_sizes=True,
        rearranges=True,
        sizes_are_offsets=True,
        example_input=slice_bounds,
    ),
    Operator("Pad", pad, example_input=pad_amounts),
    # Passes: nearest neighbors of 512 MiB take 0.83 ms on an H200, and to move the channels to them and back 0.5.
    Operator("Resize", resize, gpu_passes=4),
    Operator("Upsample", resize),
    Operator("Shape", shape, reads_part=True, shape_arithmetic=True, reads_shape=True),
    Operator("Size", shape, shape_arithmetic=True, reads_shape=True),
)
