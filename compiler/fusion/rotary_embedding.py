"""Writes rotary embedding as ONNX Runtime's operator RotaryEmbedding, which has kernels for CPUs and for CUDA.

Its inputs are data [batch, heads, length, size] or [batch, length, heads x size], tables of cosines and sines [length,
pairs], and the first position's row in the tables: 0 here. If the tables also vary along the batch, batch and length
are merged into one axis. Data of three axes, such as packed patches of images [patches, heads, size], become a batch of
one. See com.microsoft.RotaryEmbedding in ONNX Runtime's ContribOperators.md.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import onnx_ir as ir

from splitc.compiler.attention.frame import Axes
from splitc.compiler.fusion.rotary import Rotary, find_rotary, find_whole, looks_rotary, merged_heads, pairs_among
from splitc.compiler.graphs.matching import is_onnx, made_by
from splitc.compiler.graphs.walks import producer_of
from splitc.compiler.nodes import MICROSOFT, settings_of
from splitc.compiler.patterns.context import Context
from splitc.compiler.patterns.errors import NotFusedError
from splitc.compiler.patterns.kernels import check_type
from splitc.compiler.patterns.operand import SWAP_HEADS, Operand, as_operand, untransposed
from splitc.compiler.patterns.sizes import ONE, Axis, Sizes, fixed_axis, is_one, joined
from splitc.compiler.patterns.tables import Tables
from splitc.compiler.patterns.writing import Writer

OPERATOR = "RotaryEmbedding"


def fuse_rotary(last: ir.Node, context: Context) -> str | None:
    """Fuse the rotary embedding that a node ends. Returns its operator; None if it ends none."""
    if (place := pairs_among(last)) is not None:
        check_type(last.outputs[0], context.gains.parts)
        return OPERATOR if _write_among(last, place, context) else None
    if not looks_rotary(last):
        return None
    if (pairs := merged_heads(last, context.sizes)) is not None:
        _write_heads(pairs, context)
    rotary = find_rotary(last, context)
    if rotary is None:
        return None
    check_type(rotary.data, context.gains.parts)
    write_rotary(rotary, context)
    return OPERATOR


def _write_among(concat: ir.Node, place: int, context: Context) -> bool:
    """Replace inputs `place` and `place` + 1 of a Concat, the two elements of rotated pairs, by the operator, in place.

    Returns whether they are rotated pairs. Raises NotFusedError as `find_rotary` and `write_rotary`.
    """
    output, parts, axis = concat.outputs[0], list(concat.inputs), concat.attributes.get_int("axis", 0)
    axes = context.sizes.known(output, "the Concat that it is part of")
    pair = [value for value in parts[place : place + 2] if value is not None]
    joined_axes = list(axes)
    joined_axes[axis] = fixed_axis(sum(context.sizes.fixed_parts(pair, axis)))
    work = Writer.of(output, context)
    made = work.add("pairs", "Concat", parts[place : place + 2], output, joined_axes, axis=axis)
    parts[place : place + 2] = [made]
    whole_again = work.add("joined", "Concat", parts, output, axes, axis=axis)
    with work.undone_if_refused():
        rotary = find_rotary(producer_of(made), context)
        if rotary is None or rotary.output not in (made, whole_again):
            work.undo()
            return False
        rotated = write_rotary(rotary, context)
    work.take_place(rotated if rotary.output is whole_again else whole_again, output)
    return True


def write_rotary(rotary: Rotary, context: Context) -> ir.Value:
    """Replace a rotary embedding by the operator, in place. Returns its result.

    Raises NotFusedError if the operator can't express it; then nothing is changed.
    """
    sizes = context.sizes
    work = Writer.of(rotary.output, context, rotary.data, rotary.cosines, *context.editor.graph.inputs)
    own = sizes.axes(rotary.data)
    if own is None or len(own) not in (3, 4) or own[-1].fixed is None:
        raise NotFusedError("its input does not have three or four axes, the last of a fixed size")
    frame = _find_frame(rotary, _divided(own, sizes.known(rotary.cosines, "its tables (cosines and sines)")), sizes)
    if not all(map(work.has, frame.axes)):
        raise NotFusedError("no known value has one of its dynamic sizes")
    data = behind_split(rotary.data, context)
    rotary, work = replace(rotary, data=data), replace(work, sources=(data, *work.sources[1:]))
    if rotary.places is not None:
        places = work.editor.numbers(*rotary.places)
        rotary = replace(rotary, data=work.add("pairs", "Gather", [rotary.data, places], rotary.data, own, axis=-1))
    if len(own) == 3:
        rotary = replace(rotary, data=work.reshape(rotary.data, frame.axes, "four_axes"))
    made = work.reshape(_Writing(rotary, frame, work, context.tables).written(), own, "rotated_data")
    work.take_place(made, rotary.output)
    return made


def _write_heads(pairs: ir.Value, context: Context) -> None:
    """Insert heads [..., heads, 2 x pairs] between merged heads and pairs [..., heads, pairs, 2], by two Reshapes."""
    source = producer_of(pairs).inputs[0]
    assert source is not None
    work = Writer.of(pairs, context, source, *context.editor.graph.inputs)
    own = work.axes(pairs)
    heads = work.reshape(source, [*own[:3], joined(own[3:])], "heads")
    work.take_place(work.reshape(heads, own, "pairs"), pairs)


@dataclass(frozen=True)
class _Frame:
    """The data's four axes. The first is the batch, the last the head size; `length` is the index of that of positions.

    `rows` are the axes along which the tables vary: positions, and perhaps the batch. `tables` are the axes of the
    cosines and of the sines.
    """

    axes: Axes
    length: int
    rows: Axes
    tables: tuple[Axes, Axes]

    @property
    def heads(self) -> Axis:
        return self.axes[3 - self.length]

    def differs(self, table: Axes) -> bool:
        """Whether a table may have other rows than the data: in some requests, one row for all positions."""
        pairs = zip(_four(table)[:-1], self.axes[:-1], strict=True)
        return not all(own.fixed == 1 or own.is_same(axis) for own, axis in pairs)


def _find_frame(rotary: Rotary, axes: Axes, sizes: Sizes) -> _Frame:
    """The axes of a rotary embedding. Raises NotFusedError if the operator does not take data or tables like these."""
    known = (sizes.known(table, "its tables (cosines and sines)") for table in (rotary.cosines, rotary.sines))
    cosines, sines = (own[:-1] if rotary.thin else own for own in known)
    table, other = ([axis.size for axis in _four(own)] for own in (cosines, sines))
    if table != other:
        raise NotFusedError("its tables (cosines and sines) differ in shape")
    count = (rotary.part or axes[-1].fixed or 0) // (2 if rotary.by_pairs else 1)
    if table[-1] != (count, count) or any(
        size not in (ONE, axis.size) for size, axis in zip(table[:-1], axes[:-1], strict=True)
    ):
        raise NotFusedError("the shape of its tables does not fit its input")
    places = [place for place in (1, 2) if table[place] != ONE] or [n for n in (2, 1) if axes[n].size == ONE][:1]
    if len(places) != 1:
        raise NotFusedError("its tables vary by position and by head, or by neither")
    # A dynamic first axis of a table may be the batch, even if it has one element where sizes are planned.
    changes = any(len(own) == 4 and own[0].fixed != 1 for own in (cosines, sines))
    frame = _Frame(axes, places[0], (*(axes[:1] if changes else ()), axes[places[0]]), (cosines, sines))
    if frame.heads.fixed is None:
        raise NotFusedError("its number of heads is dynamic")
    return frame


def _inputs(work: Writer) -> tuple[ir.Value, ...]:
    """Values that precede every table: inputs of known sizes."""
    return tuple(value for value in work.editor.graph.inputs if work.sizes.of(value) is not None)


def _divided(own: Axes, table: Axes) -> Axes:
    """The data's axes as four: three are of a batch of one, or of one head if a dynamic first axis has no positions."""
    is_batch = len(own) == 3 and own[0].fixed is None and is_one(_four(table)[1:2])
    return (own[0], fixed_axis(1), *own[1:]) if is_batch else _four(own)


def _four(table: Axes) -> Axes:
    """A table's axes, broadcast to four."""
    return (*[fixed_axis(1)] * (4 - len(table)), *table)


@dataclass(frozen=True)
class _Writing:
    """Adds the operator for a rotary embedding, and what brings its data and tables into layouts that it takes."""

    rotary: Rotary
    frame: _Frame
    work: Writer
    tables: Tables

    def written(self) -> ir.Value:
        """Add the operator, between Reshapes and Transposes if needed. Returns its result with the axes of the data."""
        data, frame, work = self.rotary.data, self.frame, self.work
        traced = untransposed(data, 4)
        by_rows = frame.length == 1 or traced.axes == SWAP_HEADS or len(frame.rows) > 1
        if not by_rows:
            return self._rotated(data, frame.axes)
        order = SWAP_HEADS if frame.length == 2 else as_operand(data, 4).axes
        data = traced.value if traced.axes == order else work.transpose(Operand(data, order), "rows_first")
        axes = [frame.axes[place] for place in order]
        first = [fixed_axis(1), joined(axes[:2])] if len(frame.rows) > 1 else axes[:2]
        flat = (*first, joined(axes[2:]))
        made = self._rotated(work.reshape(data, flat, "rows"), flat)
        return work.transpose(Operand(work.reshape(made, axes, "rotated_rows"), order), "rotated")

    def _rotated(self, data: ir.Value, axes: Axes) -> ir.Value:
        """Add the operator, for data in a layout that it takes. Returns its result."""
        rotary, work, (cosines, sines) = self.rotary, self.work, self.frame.tables
        first = work.editor.numbers(0)
        tables = self._rows(rotary.cosines, cosines, "cosines"), self._rows(rotary.sines, sines, "sines")
        how = {"interleaved": int(rotary.interleaved), "num_heads": self.frame.heads.fixed}
        if rotary.part is not None:
            how["rotary_embedding_dim"] = rotary.part
        return work.add("rotary", OPERATOR, [data, first, *tables], data, axes, domain=MICROSOFT, **how)

    def _rows(self, table: ir.Value, own: Axes, role: str) -> ir.Value:
        """A table with these axes as [rows, pairs], in the data's type. It is made once, for all layers."""
        rotary, frame, rows = self.rotary, self.frame, self.tables.rows
        if not frame.differs(own):
            names = (axis.name for axis in frame.rows if axis.fixed is None and axis.name is not None)
            self.tables.uncompared.update(names)
        key = (table, rotary.interleaved, rotary.data.dtype)
        if key in rows:
            return rows[key]
        work = replace(self.work, at=self.tables.node_after(table), name=table.name or role, sources=_inputs(self.work))
        if frame.differs(own) and not all(map(work.has, frame.rows)):  # read off the data of the first layer
            work = replace(work, at=self.work.at, sources=self.work.sources)
        made = work.reshape(table, own, f"{role}_flat")
        pairs = fixed_axis((rotary.part or frame.axes[-1].size[0]) // 2)
        if not rotary.by_pairs:
            indices = np.arange(0, 2 * pairs.size[0], 2) if rotary.interleaved else np.arange(pairs.size[0])
            chosen = work.editor.constant(indices)
            made = work.add(f"{role}_of_pairs", "Gather", [made, chosen], table, (*own[:-1], pairs), axis=-1)
        made = _by_rows(made, pairs, role, frame, work)
        rows[key] = work.cast(made, rotary.data, f"{role}_cast")
        return rows[key]


def _by_rows(table: ir.Value, pairs: Axis, role: str, frame: _Frame, work: Writer) -> ir.Value:
    """A table as [rows, pairs], with a row for each position of the data, and each batch entry if it varies along it.

    Of a table with more rows than positions, the operator would silently take the first: a Reshape to the number of
    positions fails instead. It is not needed where both sizes have one symbol: requests are checked for that, see
    `uncompared`.
    """
    own, flat = work.axes(table), (joined(frame.rows), pairs)
    if not frame.differs(own):
        return work.reshape(table, flat, role)
    four = _four(own)
    table = work.reshape(table, [*four[: len(frame.rows) - 1], four[frame.length], pairs], f"{role}_by_rows")
    sizes = [work.list_of([axis], f"{role}_size{place}") for place, axis in enumerate(frame.rows)]
    last = work.list_of([pairs], role)
    wanted = work.integers(f"{role}_sizes", "Concat", [*sizes, last], len(sizes) + 1, axis=0)
    table = work.add(f"{role}_repeated", "Expand", [table, wanted], table, (*frame.rows, pairs))
    count = sizes[0] if len(sizes) == 1 else work.integers(f"{role}_count", "Mul", sizes, 1)
    as_many = work.integers(f"{role}_rows", "Concat", [count, last], 2, axis=0)
    return work.add(role, "Reshape", [table, as_many], table, flat)


def move_rotary(node: ir.Node, context: Context) -> str | None:
    """Move ONNX's RotaryEmbedding before the Slice or Transpose of its heads. Returns it; None if it stays.

    The operator takes part of a head, and either layout. Behind it, attention may absorb the Transpose.
    """
    data, output, part = node.inputs[0] if is_onnx(node, OPERATOR) else None, node.outputs[0], None
    own = None if data is None else context.sizes.axes(data)
    if data is None or own is None or len(own) != 4:
        return None
    if not node.attributes.get_int("rotary_embedding_dim", 0) and (whole := find_whole(data, output, context)):
        (data, output), part = whole, own[3].fixed
    elif not _is_turned(data) or made_by(data, "Transpose") is None or len(data.uses()) > 1 or data.is_graph_output():
        return None
    check_type(data, context.gains.parts)
    own = context.sizes.known(data, "its heads")
    if own[1].fixed is None or own[3].fixed is None:
        raise NotFusedError("its number of heads is dynamic")
    data = behind_split(data, context)
    work = Writer.of(output, context, data)
    how = {**settings_of(node), "num_heads": own[1].fixed}
    if part is not None:
        how["rotary_embedding_dim"] = part
    is_turned = _is_turned(data)
    if is_turned:
        data = untransposed(data, 4).value
        own, work = work.axes(data), replace(work, sources=(data,))
        data = work.reshape(data, [*own[:2], joined(own[2:])], "rows")
    made = work.add("rotary", OPERATOR, [data, *node.inputs[1:]], data, work.axes(data), **how)
    if is_turned:
        made = work.transpose(Operand(work.reshape(made, own, "rotated_rows"), SWAP_HEADS), "rotated")
    work.take_place(made, output)
    return OPERATOR


def _is_turned(data: ir.Value) -> bool:
    """Whether data [batch, heads, length, size] are the transpose of [batch, length, heads, size]."""
    return untransposed(data, 4).axes == SWAP_HEADS


def behind_split(value: ir.Value, context: Context) -> ir.Value:
    """Move a Transpose from before a Split to behind it, in place. Returns the new value of the part `value`.

    Any other value is returned as it is.
    """
    sizes, node = context.sizes, made_by(value, "Split")
    own = sizes.axes(value)
    source = None if node is None else node.inputs[0]
    if node is None or source is None or own is None or len(source.uses()) > 1 or source.is_graph_output():
        return value
    traced = untransposed(source, len(own))
    axes = [sizes.axes(part) for part in node.outputs]
    if traced.is_value or sizes.axes(traced.value) is None or None in axes:
        return value
    how = {**settings_of(node), "axis": traced.axes[node.attributes.get_int("axis", 0)]}
    split = ir.node("Split", [traced.value, *node.inputs[1:]], how, num_outputs=len(node.outputs))
    work = Writer(node, value.name or "", (), context.editor, sizes)
    work.insert(split)
    moved = []
    for part, new, part_axes in zip(node.outputs, split.outputs, axes, strict=True):
        assert part_axes is not None
        work.name_value(new, "part", part, [part_axes[traced.axes.index(n)] for n in range(len(own))])
        moved.append(work.transpose(Operand(new, traced.axes), "part_turned"))
        work.take_place(moved[-1], part)
    return moved[node.outputs.index(value)]
