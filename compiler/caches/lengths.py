"""Adds inputs for the lengths of caches: a cache with spare capacity no longer has its length as its size.

The length is the size of an added input [length, 0], which the runtime feeds and a caller does not see. So it is a
dynamic size as any other, and shape inference knows what follows from it.

On GPUs, a second input [capacity, 0] has the caches' capacity as its size, and the bias of the scores is as long. All
that depends on the length is then computed before the ranks (preamble.py), so that these see the same sizes in each
request, and replay it.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import onnx_ir as ir

from splitc.compiler.caches.cache import ROWS
from splitc.compiler.graphs.unused import remove_unused_inputs
from splitc.compiler.nodes import unused_name
from splitc.compiler.patterns.context import Context
from splitc.compiler.patterns.errors import NotFusedError
from splitc.compiler.patterns.sizes import Axis, Size, fixed_axis, size_readers
from splitc.compiler.patterns.writing import Writer
from splitc.compiler.states.own_sizes import mark_for_its_size, mark_fused_cache
from splitc.runtime.package.states import Length

# The name of the input for the length; with a number behind it if the model has that name.
NAME = "splitc.past"
# The name of the input for the capacity.
ROOM = "splitc.room"
# Added to the capacity's probe size, so that it differs from other sizes.
APART = 1009
# GroupQueryAttention takes no batch of several tokens each after cached ones: for these there is a branch, which
# engine_graphs/several_rows.py adds. This key of a node's metadata asks for it; its value is the input for the length.
# BRANCH_NODES is the most nodes that a branch usually has.
SEVERAL_ROWS, BRANCH_NODES = "splitc.several_rows", 44
# The first opset that has all operators of such a branch.
OPSET = 12


@dataclass(frozen=True)
class Filled:
    """The filled rows of caches of the same length, and the values that GroupQueryAttention takes them by.

    - `input`: the added input, whose first axis `past` is the length before the request. `all` is that after it.
    - `before`, `after`: both lengths as values of one int64.
    - `step`: how many rows a request adds: a number, or the input's name and axis that has this size.
    - `room`: the added input for the capacity; None without one. `rows` is its size as a value.
    - `total`: the operator's total_sequence_length, the length after the request, or the capacity if there is a `room`:
      the operator's bias is as long.
    - `lasts`: its seqlens_k, the index of the last filled row, for each row of the batch.
    - `several`: a request may have several rows of several tokens, which the operator can't run after cached ones.
      Without a `room`, engines have a branch for them.
    """

    input: ir.Value
    past: Axis
    all: Axis
    before: ir.Value
    after: ir.Value
    total: ir.Value
    lasts: ir.Value
    work: Writer
    step: int | tuple[str, int]
    several: bool
    room: ir.Value | None = None
    rows: ir.Value | None = None

    @property
    def has_branch(self) -> bool:
        """Whether engines have a branch for several rows with several tokens."""
        return self.several and self.room is None

    @property
    def known(self) -> Mapping[Size, ir.Value]:
        """The values `before` and `after`, by the sizes that they hold."""
        return {self.past.size: self.before, self.all.size: self.after}

    def entry(self, pasts: Iterable[str], one_row: bool) -> Length:
        """The manifest's entry. `pasts` are the names of the caches' inputs.

        `one_row`: one of their operators takes several tokens after cached ones in a batch of one row only.
        """
        return Length(
            input=self.input.name or "",
            states=list(pasts),
            axis=ROWS,
            adds=self.step if isinstance(self.step, int) else 0,
            reads=None if isinstance(self.step, int) else self.step,
            by_branch=self.has_branch,
            room=None if self.room is None else self.room.name,
            one_row=one_row and self.several and self.room is not None,
        )

    @property
    def inputs(self) -> list[ir.Value]:
        """The added inputs."""
        return [self.input, *([] if self.room is None else [self.room])]

    def with_room(self, bias: ir.Value, work: Writer) -> ir.Value:
        """A bias [batch, heads, length, all], padded with zeros to the capacity; unchanged without a capacity."""
        if self.room is None or self.rows is None:
            return bias
        zeros = work.editor.constant(np.zeros(7, np.int64))
        lacking = work.integers("lacking", "Sub", [self.rows, self.after], 1)
        pads = work.integers("pads", "Concat", [zeros, lacking], 8, axis=0)
        return work.add("bias_room", "Pad", [bias, pads], bias, [*work.axes(bias)[:-1], work.axes(self.room)[0]])


class Lengths:
    """The inputs for the lengths of a graph's caches: one for all caches of the same length."""

    def __init__(self, context: Context, pasts: Collection[ir.Value]) -> None:
        self._context, self._editor, self._sizes = context, context.editor, context.sizes
        self._filled: dict[Size, Filled] = {}
        # The names of caches that are in place, and which of them are `one_row` (see Filled.entry), by their length.
        self._states: dict[Size, list[str]] = {}
        self._for_one_row: set[Size] = set()
        # The size of a past may be its capacity, so no size is read off it.
        known = (
            value for value in self._editor.graph.inputs if self._sizes.of(value) is not None and value not in pasts
        )
        self.read: tuple[ir.Value, ...] = tuple(known)

    @property
    def filled(self) -> list[Filled]:
        """The filled rows of all caches that are in place."""
        return [filled for length, filled in self._filled.items() if length in self._states]

    def of(self, past: ir.Value, new: ir.Value, present: ir.Value) -> Filled:
        """The filled rows of a cache, with the rows that a request adds to it, and its present.

        Raises NotFusedError if its length equals another size, or no input has as many elements as a request adds.
        """
        before, added, after = (self._sizes.known(value, "its cache") for value in (past, new, present))
        length, total = before[ROWS], after[ROWS]
        is_fixed = length.fixed is not None or total.fixed is not None
        if is_fixed or length.size == added[-2].size or not self._sizes.differ:
            raise NotFusedError("the length of its cache can't be told apart from other sizes")
        if length.size not in self._filled:
            self._filled[length.size] = self._add(length, added, total)
        return self._filled[length.size]

    def _add(self, past: Axis, new: Sequence[Axis], total: Axis) -> Filled:
        graph, tokens = self._editor.graph, new[-2]
        step = self._place_of(tokens) if tokens.fixed is None else tokens.fixed
        several = tokens.fixed != 1 and new[0].fixed != 1
        if several and graph.opset_imports.get("", 1) < OPSET:
            raise NotFusedError(
                f"the model's opset is below {OPSET}, whose operators a batch needs: export it with a later opset"
            )
        if step is None:
            raise NotFusedError("no axis of an input is the number of tokens that a request adds to its cache")
        name = unused_name(NAME, self._sizes.shapes)
        value = ir.Value(name=name, type=ir.TensorType(ir.DataType.BOOL))
        graph.inputs.append(value)
        mark_for_its_size(value)
        # With a batch the second axis is dynamic, but 0 where sizes are planned.
        second = Axis((0, 0), ir.SymbolicDim("0"), 0) if several else fixed_axis(0)
        self._sizes.put(value, [past, second])
        room = self._add_room(total) if self._context.gains.has_room else None
        own = (value, *self.read) if room is None else (value, room, *self.read)
        work = Writer(graph[0], name, own, self._editor, self._sizes)
        try:
            before = work.list_of([past], "before")
            after = work.integers("after", "Add", [before, work.list_of([tokens], "added")], 1)
            counted = after if room is None else work.list_of([work.axes(room)[0]], "room")
            filled, lasts = _add_int32(work, after, counted, new[0])
        except NotFusedError:
            work.undo()
            for made in own[: 1 + (room is not None)]:
                graph.inputs.remove(made)
            raise
        rows = None if room is None else counted
        return Filled(value, past, total, before, after, filled, lasts, work, step, several, room, rows)

    def _add_room(self, total: Axis) -> ir.Value:
        """The input for the capacity, which equals the filled length where sizes are planned."""
        name = unused_name(ROOM, self._sizes.shapes)
        room = ir.Value(name=name, type=ir.TensorType(ir.DataType.BOOL))
        self._editor.graph.inputs.append(room)
        mark_for_its_size(room)
        planned, probe = total.size
        # onnx_ir parses symbols as expressions, which can't contain a prime.
        symbol = ir.SymbolicDim(name.replace("'", "_"))
        self._sizes.put(room, [Axis((planned, probe + APART * (1 + len(self._filled))), symbol), fixed_axis(0)])
        return room

    def _place_of(self, axis: Axis) -> tuple[str, int] | None:
        """The name and axis of the first input, other than a state, that has this size; None if there is none."""
        for value in (value for value in self.read if value.name not in self._context.pasts):
            for place, own in enumerate(self._sizes.axes(value) or ()):
                if own.size == axis.size:
                    return value.name or "", place
        return None

    def writer(self, at: ir.Node, *filled: Filled) -> Writer:
        """A writer of nodes before `at` that reads sizes off inputs, and off the lengths in `filled`."""
        known = {size: value for one in filled for size, value in one.known.items()}
        return Writer(at, at.outputs[0].name or "", self.read, self._editor, self._sizes, known=known)

    def rewrite_sizes(self, values: Iterable[ir.Value], filled: Filled) -> None:
        """Make nodes that read sizes of these values read them off inputs instead."""
        for node in size_readers(*values):
            self.writer(node, filled).read_elsewhere(node, "sizes")

    def check_sizes(self, values: Iterable[ir.Value], filled: Filled) -> None:
        """Raise NotFusedError if `rewrite_sizes` would find no input with such a size."""
        for node in size_readers(*values):
            if not self.writer(node, filled).can_read_elsewhere(node):
                raise NotFusedError("a size of its cache is read that no input has, or is an output")

    def are_in_place(self, pasts: Iterable[ir.Value], filled: Filled, one_row: bool) -> None:
        """Record that caches of this length, whose inputs are `pasts`, are written in place now.

        `one_row` is as for `Filled.entry`.
        """
        names = self._states.setdefault(filled.past.size, [])
        if one_row:
            self._for_one_row.add(filled.past.size)
        for past in pasts:
            names.append(past.name or "")
            mark_fused_cache(past, ROWS)

    def entries(self) -> tuple[Length, ...]:
        """The manifest's entries. Added inputs that no fused cache needs are removed."""
        for length, filled in self._filled.items():
            if length not in self._states:
                filled.work.undo()
        remove_unused_inputs(self._editor.graph, [own for filled in self._filled.values() for own in filled.inputs])
        lengths = [filled.past.size for filled in self.filled]
        return tuple(self._filled[one].entry(self._states[one], one in self._for_one_row) for one in lengths)


def _add_int32(work: Writer, after: ir.Value, counted: ir.Value, batch: Axis) -> tuple[ir.Value, ir.Value]:
    """The operator's total_sequence_length (`counted`), and its seqlens_k from the length `after` the request."""
    total = work.integers("total", "Cast", [counted], 1, to=ir.DataType.INT32)
    filled = total if counted is after else work.integers("filled", "Cast", [after], 1, to=ir.DataType.INT32)
    for value in (total, filled):
        value.type = ir.TensorType(ir.DataType.INT32)
    last = work.add("last", "Sub", [filled, work.editor.constant(np.array([1], np.int32))], filled, [fixed_axis(1)])
    return total, work.expand(last, [batch], "lasts")
