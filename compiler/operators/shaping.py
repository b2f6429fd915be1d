"""Operators that rearrange: reshape, transpose, join, cut, repeat."""

from __future__ import annotations

from collections.abc import Sequence

from splitc.compiler.operators import axes as ax
from splitc.compiler.operators.axes import Axis
from splitc.compiler.operators.operation import Operation
from splitc.compiler.operators.operator import Operator

LINEAR = (frozenset([0]),)


def reshape(op: Operation) -> None:
    """The elements keep their order, so factors line up from the major to the minor ones."""
    merged_in = tuple(factor for axis in op.input(0) for factor in axis)
    merged_out = tuple(factor for axis in op.output() for factor in axis)
    op.relate(merged_in, merged_out)
    op.free([*op.input(0), *op.output()])
    op.linear = LINEAR
    if op.node.op_type == "Reshape":
        op.say_sizes(1, op.output())


def squeeze(op: Operation) -> None:
    reshape(op)
    if not op.has(1) and op.numbers_of("axes") is None:
        op.whole((axis for axis in op.input(0) if axis), "it drops each axis of size 1, and so a shard of one unit")


def transpose(op: Operation) -> None:
    order = op.numbers_of("perm") or list(reversed(range(len(op.input(0)))))
    op.relate_all([op.input(0)[axis] for axis in order], op.output())
    op.linear = LINEAR


def expand(op: Operation) -> None:
    """A repeated axis is new and unrelated to any other. The sizes given may be those of the last axes alone."""
    op.broadcast(op.input(0), op.output())
    op.free(op.output())
    given = ax.size_of(op.input(1)[0])
    op.say_sizes(1, op.output()[max(0, len(op.output()) - given) :])
    op.linear = LINEAR


def tile(op: Operation) -> None:
    counts: list[Axis] = []
    for source, target in zip(op.input(0), op.output(), strict=True):
        count = ax.new_axis(ax.size_of(target) // max(1, ax.size_of(source)))
        op.relate(target, (*count, *source))
        op.free([source])
        counts.append(count)
    op.say_sizes(1, counts)
    op.linear = LINEAR


def constant_of_shape(op: Operation) -> None:
    op.free(op.output())
    op.say_sizes(0, op.output())


def join(op: Operation, values: Sequence[int]) -> None:
    """These inputs are sections of the axis that is joined."""
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
        for place, (source, target) in enumerate(zip(op.input(0), op.output(number), strict=True)):
            if place != axis:
                op.relate(source, target)
    if op.has(1):
        op.say_sizes(1, sections)
    elif op.numbers_of("split"):
        op.attributes["split"] = sections
    else:
        op.equal_parts = True
    op.linear = LINEAR


def slice_(op: Operation) -> None:
    """A slice with known bounds is a section of its axis. A strided one is the major factor of its axis."""
    source, target = op.input(0), op.output()
    starts, ends = op.numbers(1, "starts"), op.numbers(2, "ends")
    places = op.numbers(3, "axes") if op.has(3) or op.numbers_of("axes") else list(range(len(starts or ())))
    steps = op.numbers(4) if op.has(4) else [1] * len(places or ())
    op.linear = LINEAR
    sliced = {place % len(source): number for number, place in enumerate(places or ())}
    for place, (a, b) in enumerate(zip(source, target, strict=True)):
        if place not in sliced and places is not None:
            op.relate(a, b)
    if starts is None or ends is None or places is None or steps is None:
        return
    before: list[Axis | None] = [None] * len(starts)
    until: list[Axis | None] = [None] * len(starts)
    for place, number in sliced.items():
        size = ax.size_of(source[place])
        start, end, step = *_bounds(starts[number], ends[number], size), steps[number]
        if step == 1 and (start, end) == (0, size):
            op.relate(source[place], target[place])
            until[number] = source[place] if ends[number] == size else None
        elif step == 1 and start < end:
            head, middle, _ = op.cut(source[place], [start, end - start, size - end])
            op.relate(middle, target[place])
            before[number] = head
            if ends[number] <= size:
                sections = tuple(part for part in (head, middle) if ax.size_of(part))
                until[number] = (ax.Factor(end, sections=sections),)
        elif step > 1 and size % step == 0 and start < step and ax.size_of(target[place]) == size // step:
            stride = ax.new_axis(step)
            op.relate(source[place], (*target[place], *stride))
            op.free([target[place]])
            op.whole([stride], "it takes one of each few")
            until[number] = source[place] if ends[number] == size else None
    _say_bounds(op, before, until)


def _bounds(start: int, end: int, size: int) -> tuple[int, int]:
    """Start and end of a slice as ONNX clamps them."""
    start = start + size if start < 0 else start
    end = end + size if end < 0 else end
    return min(max(start, 0), size), min(max(end, 0), size)


def _say_bounds(op: Operation, before: list[Axis | None], until: list[Axis | None]) -> None:
    if op.numbers_of("starts") is not None:
        op.attributes.update(starts=before, ends=until)
    else:
        op.say_sizes(1, before)
        op.say_sizes(2, until)


def pad(op: Operation) -> None:
    """Axes that are not padded are the same. One that is padded by -1 and 1 has the same size, and is not."""
    pads, rank = op.numbers(1, "pads"), len(op.input(0))
    places = op.numbers(3) if op.has(3) else list(range(rank))
    if pads is None or places is None:
        return
    padded = {place % rank for place, *both in zip(places, pads, pads[len(places) :], strict=False) if any(both)}
    for place, (source, target) in enumerate(zip(op.input(0), op.output(), strict=True)):
        if place not in padded:
            op.relate(source, target)


def resize(op: Operation) -> None:
    """Batch and channels are the same. Axes that are scaled are needed whole."""
    for source, target in zip(op.input(0)[:2], op.output()[:2], strict=True):
        if ax.size_of(source) == ax.size_of(target):
            op.relate(source, target)
    rank = len(op.output())
    op.say_sizes(3, [op.output()[place % rank] for place in op.numbers_of("axes") or range(rank)])


def shape(op: Operation) -> None:
    """A rank reads the sizes of its own shard. They are corrected where whole sizes are needed (`SizeRewriter`)."""
    op.free(op.input(0))


def whole_axes(op: Operation, number: int) -> int | None:
    """Bounds of a Slice that leaves its axes whole: starts, ends, and steps."""
    return {1: 0, 2: 2**31 - 1, 4: 1}.get(number)


OPERATORS = (
    Operator("Reshape", reshape, view=True, folds=True, passes_sizes=True, rearranges=True),
    Operator("Flatten", reshape, view=True, folds=True, rearranges=True),
    Operator("Squeeze", squeeze, view=True, folds=True, passes_sizes=True, rearranges=True),
    Operator("Unsqueeze", reshape, view=True, folds=True, passes_sizes=True, rearranges=True),
    Operator("Transpose", transpose, folds=True, rearranges=True),
    Operator("Expand", expand, folds=True, expands=True, rearranges=True),
    Operator("Tile", tile, folds=True, expands=True, rearranges=True),
    Operator("ConstantOfShape", constant_of_shape, folds=True, expands=True),
    Operator("Concat", concat, folds=True, passes_sizes=True, rearranges=True),
    Operator("Split", split, folds=True, rearranges=True, takes_places=True),
    Operator(
        "Slice",
        slice_,
        reads_part=True,
        folds=True,
        passes_sizes=True,
        rearranges=True,
        takes_places=True,
        example=whole_axes,
    ),
    Operator("Pad", pad),
    Operator("Resize", resize),
    Operator("Upsample", resize),
    Operator("Shape", shape, reads_part=True, folds=True, reads_shape=True),
    Operator("Size", shape, folds=True, reads_shape=True),
)
