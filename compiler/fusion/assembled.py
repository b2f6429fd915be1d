"""Replaces assignments to slices of a tensor by one Concat of the slices.

PyTorch code assigns to slices of an empty tensor: `keys[..., :n] = a`, or `pairs[..., 0::2] = a`. Exporters write each
assignment as a ScatterND: of rows, with the axis transposed to the front, or of single elements, each with its index.
Either copies the whole tensor for each slice, and can't be sharded.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import onnx_ir as ir

from splitc.compiler.caches.scattered import is_assignment
from splitc.compiler.fusion.rotary_embedding import fuse_rotary
from splitc.compiler.graphs.matching import VIEWS, is_onnx, made_by, source_through, value_before
from splitc.compiler.graphs.walks import producer_of
from splitc.compiler.patterns.context import Context
from splitc.compiler.patterns.errors import NotFusedError
from splitc.compiler.patterns.operand import Operand, untransposed
from splitc.compiler.patterns.sizes import ONE, Axis, Sizes, fixed_axis
from splitc.compiler.patterns.writing import Writer

OPERATOR = "Concat"


@dataclass(frozen=True)
class Slice:
    """One assignment, `data[start:end:step] = rows` along an `axis`, by a ScatterND."""

    node: ir.Node
    data: ir.Value
    rows: ir.Value
    axis: int
    start: int
    end: int
    step: int = 1


@dataclass(frozen=True)
class Assembled:
    """The assignments that build one value, in order. Each one changes the result of the one before.

    `axes` are those of the value.
    """

    slices: tuple[Slice, ...]
    axes: tuple[Axis, ...]

    @property
    def output(self) -> ir.Value:
        """The result of the last assignment."""
        return self.slices[-1].node.outputs[0]

    def owners(self) -> list[int]:
        """For each index of the axis, the number of the last slice that writes there; -1 if none does."""
        owners = [-1] * (self.axes[self.slices[0].axis].fixed or 0)
        for number, one in enumerate(self.slices):
            owners[one.start : one.end : one.step] = [number] * len(range(one.start, one.end, one.step))
        return owners

    def alternating(self) -> list[int]:
        """The numbers of slices that are interleaved, in order, as of `[0::2]` and `[1::2]`; empty for others."""
        owners, step = self.owners(), self.slices[-1].step
        turn = owners[:step]
        fits = step > 1 and len(set(turn)) == step and owners == turn * (len(owners) // step)
        return turn if fits and -1 not in turn and all(one.step == step for one in self.slices) else []

    def base(self) -> Operand:
        """What the first assignment writes to, traced back through transposes."""
        return untransposed(self.slices[0].data, len(self.axes))


def fuse_assembled(node: ir.Node, context: Context) -> str | None:
    """Replace assignments to slices, of which the node is the last, by a Concat. Returns the operator, or None.

    If the slices are the rotated elements of pairs, they become a rotary embedding.
    """
    assembled = find_assembled(node, context) if node.op_type == "ScatterND" else None
    if assembled is None:
        return None
    concat = write_assembled(assembled, context)
    try:
        return fuse_rotary(concat, context) or OPERATOR
    except NotFusedError:  # the Concat is better than the assignments
        return OPERATOR


def find_assembled(node: ir.Node, context: Context) -> Assembled | None:
    """The assignments of which a node is the last; None if it is no assignment, or not the last one."""
    last = _find_slice(node, context)
    if last is None or _is_written_to(node, last.axis, context):
        return None
    slices = [last]
    while (before := _before(slices[0], context)) is not None:
        slices.insert(0, before)
    axes = context.sizes.axes(last.node.outputs[0])
    return None if axes is None else Assembled(tuple(slices), axes)


def write_assembled(assembled: Assembled, context: Context) -> ir.Node:
    """Replace the assignments by a Concat, in place, without their transposes. Returns the Concat.

    Indices that no slice writes are filled from the tensor that the first assignment changes. Raises NotFusedError if
    that tensor is copied without a transpose anyway, and for slices with steps that do not interleave.
    """
    owners, axis, output = assembled.owners(), assembled.slices[0].axis, assembled.output
    turns, base = assembled.alternating(), assembled.base()
    has_steps = any(one.step > 1 for one in assembled.slices)
    is_state = base.is_value or base.value.is_graph_input() or context.sizes.axes(base.value) is None
    if -1 in owners and (is_state or has_steps):
        raise NotFusedError("its slices do not cover the whole tensor, so that the rest has to be copied anyway")
    if has_steps and not turns:
        raise NotFusedError("its slices have steps, and do not interleave")
    sources = [untransposed(one.rows, len(assembled.axes)) for one in assembled.slices]
    order = sources[-1].axes
    back = [order.index(number) for number in range(len(order))]
    work = Writer.of(output, context)
    natural, place = [assembled.axes[number] for number in back], order[axis]
    parts_of = dict(enumerate(sources)) | {-1: base}
    rows = {n: work.transpose(parts_of[n].transposed(back), f"rows{n}") for n in dict.fromkeys(owners)}
    if turns:
        made = joined = _taking_turns([rows[number] for number in turns], place, work)
        made = work.reshape(joined, natural, "joined")
    else:
        starts = {-1: 0, **{number: one.start for number, one in enumerate(assembled.slices)}}
        runs = [(number, start - starts[number], end - starts[number]) for number, (start, end) in _runs(owners)]
        parts = [_cut(rows[number], place, start, end, work) for number, start, end in runs]
        made = joined = work.add("joined", OPERATOR, parts, parts[0], natural, axis=place)
    _replace(output, Operand(made, order), work)
    return producer_of(joined)


def _taking_turns(rows: Sequence[ir.Value], axis: int, work: Writer) -> ir.Value:
    """Values interleaved along an axis, as [..., axis, number of values, ...]."""
    axes = work.axes(rows[0])
    thin = [*axes[: axis + 1], fixed_axis(1), *axes[axis + 1 :]]
    parts = [work.reshape(value, thin, f"turn{number}") for number, value in enumerate(rows)]
    full = [*axes[: axis + 1], fixed_axis(len(rows)), *axes[axis + 1 :]]
    return work.add("turns", OPERATOR, parts, parts[0], full, axis=axis + 1)


def _find_slice(node: ir.Node, context: Context) -> Slice | None:
    """The assignment that a ScatterND makes; None for other operators, and for indices that are no slice."""
    if not is_assignment(node):
        return None
    (data, indices, rows), sizes = node.inputs, context.sizes
    if data is None or indices is None or rows is None or not sizes.differ:
        return None
    own, written, listed = sizes.of(data), sizes.axes(rows), sizes.of(indices)
    if own is None or written is None or listed is None or not listed[-1][0] == listed[-1][1] == len(listed) - 1:
        return None
    places = [_places(indices, number, context) for number in range(len(listed) - 1)]
    cut = (
        [number for number, size in enumerate(own) if size != written[number].size] if len(own) == len(written) else []
    )
    axis = cut[0] if cut else 0
    if len(cut) > 1 or axis >= len(places) or any(one is None for one in places) or own[axis][0] != own[axis][1]:
        return None
    ranges = [_range(one, written[number].size[1]) for number, one in enumerate(places) if one is not None]
    whole_axes = (one == range(len(one or ())) for number, one in enumerate(ranges) if number != axis)
    own_range, count = ranges[axis], written[axis].fixed
    if own_range is None or count is None or not all(whole_axes):
        return None
    start, step = own_range.start, own_range.step
    return Slice(node, data, _without_repeats(rows, sizes), axis, start, start + (count - 1) * step + 1, step)


def _range(places: Sequence[int], count: int) -> range | None:
    """The `count` indices as a range; None if they are irregular, or another number."""
    step = places[1] - places[0] if count > 1 and len(places) > 1 else 1
    if not count or places[0] < 0 or step < 1:
        return None
    listed = range(places[0], places[0] + (count - 1) * step + 1, step)
    return listed if list(places) == list(listed) else None


def _places(indices: ir.Value, number: int, context: Context) -> list[int] | None:
    """The indices along axis `number` in the `indices` [..., axes] of a ScatterND; None if they vary along other axes.

    Exporters make indices of single elements by a Concat of the indices along each axis, expanded along the others.
    """
    sizes, value = context.sizes, indices
    listed = sizes.of(indices)
    assert listed is not None
    if len(listed) > 2:
        node = made_by(indices, "Concat")
        if node is None or len(node.inputs) != len(listed) - 1:
            return None
        joined = node.inputs[number]
        if joined is None or node.attributes.get_int("axis", 0) not in (-1, len(listed) - 1):
            return None
        value = _before_repeats(joined, sizes)
        own = sizes.of(value)
        if own is None or len(own) >= len(listed):
            return None
        padded = [*[ONE] * (len(listed) - 1 - len(own)), *own]
        if any(size != (listed[place] if place == number else ONE) for place, size in enumerate(padded)):
            return None
    numbers = context.tables.follow_from_sizes(value)
    return None if numbers is None else [int(one) for one in numbers.reshape(-1)]


def _before_repeats(value: ir.Value, sizes: Sizes) -> ir.Value:
    """The value before an Unsqueeze and an Expand."""
    source = value_before(value, *VIEWS)
    if source is not None and sizes.of(value) == (*(sizes.of(source) or ()), ONE):
        value = source
    return value_before(value, "Expand") or value


def _without_repeats(value: ir.Value, sizes: Sizes) -> ir.Value:
    """The value before nodes that keep its shape and elements."""
    while (source := value_before(value, "Expand", *VIEWS)) is not None and sizes.of(source) == sizes.of(value):
        value = source
    return value


def _before(one: Slice, context: Context) -> Slice | None:
    """The assignment that this one changes the result of, if it is along the same axis."""
    source = untransposed(one.data, len(context.sizes.of(one.data) or ()))
    data = source_through(source.value, "Identity")  # exporters make one of two inverse transposes
    node = data.producer() if source.is_value else None
    before = None if node is None else _find_slice(node, context)
    return before if before is not None and before.axis == one.axis else None


def _is_written_to(node: ir.Node, axis: int, context: Context) -> bool:
    """Whether a further assignment changes a node's result along the same axis."""
    level = [node.outputs[0]]
    for _ in range(3):  # in between, the axis is transposed back, and to the front again
        users = [user for value in level for user, place in value.uses() if not place]
        after = (_find_slice(user, context) for user in users if user.op_type == node.op_type)
        if any(one is not None and one.axis == axis for one in after):
            return True
        level = [user.outputs[0] for user in users if is_onnx(user, "Transpose", "Identity")]
    return False


def _runs(owners: Sequence[int]) -> list[tuple[int, tuple[int, int]]]:
    """Runs of consecutive indices with the same owner: the owner, the start, and the end."""
    ends = [*(np.flatnonzero(np.diff(owners)) + 1).tolist(), len(owners)]
    return [(owners[start], (start, end)) for start, end in zip([0, *ends], ends, strict=False)]


def _cut(rows: ir.Value, axis: int, start: int, end: int, work: Writer) -> ir.Value:
    """A slice's rows from `start` to `end`: those that no later slice overwrites."""
    axes = list(work.axes(rows))
    if (start, end) == (0, axes[axis].fixed):
        return rows
    axes[axis] = fixed_axis(end - start)
    bounds = map(work.editor.numbers, (start, end, axis))
    return work.add("left", "Slice", [rows, *bounds], rows, axes)


def _replace(old: ir.Value, operand: Operand, work: Writer) -> None:
    """Replace a value by an operand. Readers that transpose it back read the operand's value itself."""
    for node in [user for user, _ in old.uses() if is_onnx(user, "Transpose")]:
        transposed = node.outputs[0]
        order = node.attributes.get_ints("perm", tuple(reversed(range(len(operand.axes)))))
        if operand.transposed(order).is_value:
            if transposed.is_graph_output():
                work.take_place(operand.value, transposed)
            else:
                transposed.replace_all_uses_with(operand.value)
    work.take_place(work.transpose(operand, "turned"), old)
