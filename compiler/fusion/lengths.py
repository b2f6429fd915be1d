"""How many rows of a cache are filled: with room behind them, its own size no longer says it.

It is the size of an input of its own, [rows, 0], which the runtime feeds and a caller does not see. So it is a size as
any other: what follows from it is known wherever sizes are.

On GPUs, another such input says how much room there is, [rows, 0], and what is added to the scores is as long. All that
follows from the rows filled is then computed before the ranks (preamble.py), so that these see the same sizes in each
request, and replay it.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import onnx_ir as ir

from splitc.compiler.frontend.editor import Editor
from splitc.compiler.frontend.reads import given_sizes
from splitc.compiler.frontend.room import give_room, is_to_say_a_size
from splitc.compiler.frontend.unused import remove_unused_inputs
from splitc.compiler.fusion.attention import NotFusedError
from splitc.compiler.fusion.cache import ROWS, Cache
from splitc.compiler.fusion.sizes import Axis, Size, Sizes, fixed_axis, size_readers
from splitc.compiler.fusion.writing import Writer
from splitc.compiler.nodes import unused_name
from splitc.runtime.package.states import Length

# What the input is called. A model's own names that begin so get another end.
NAME = "splitc.past"
# What the input for the room is called.
ROOM = "splitc.room"
# What sets the probe of the room apart from other sizes.
APART = 1009
# Marks attentions that take several rows with several tokens after cached ones by a branch (lowering/several_rows.py),
# with the input for the caches' length, in the nodes' metadata; and the most nodes that a branch has, as a rule.
SEVERAL_ROWS, BRANCH_NODES = "splitc.several_rows", 44
# From this opset on, there are the operators of such a branch.
OPSET = 12


@dataclass(frozen=True)
class Filled:
    """The filled rows of caches that are as long: an input of `past` rows, and the axes that a request makes of them.

    `before` and `after` are lists of one size: the rows before the request, and with those that it adds. `total` is the
    latter as the operator takes it, and `lasts` the last of them for each row of the batch. `step` is how many it adds:
    a number, or the axis of an input that has as many. With a `room`, of which `rows` is a list, `total` is as large:
    the operator's bias has that length. The operator takes no requests of `several` rows with several tokens: where
    there is no room, engines have a branch for them.
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
        """The lists by the sizes that they say."""
        return {self.past.size: self.before, self.all.size: self.after}

    def entry(self, pasts: Iterable[str]) -> Length:
        """What the runtime is told."""
        return Length(
            input=self.input.name or "",
            states=list(pasts),
            axis=ROWS,
            adds=self.step if isinstance(self.step, int) else 0,
            reads=None if isinstance(self.step, int) else self.step,
            by_branch=self.has_branch,
            room=None if self.room is None else self.room.name,
            one_row=self.several and self.room is not None,
        )

    @property
    def inputs(self) -> list[ir.Value]:
        """The inputs that the model does not have."""
        return [self.input, *([] if self.room is None else [self.room])]

    def with_room(self, bias: ir.Value, work: Writer) -> ir.Value:
        """What is added to scores [batch, heads, length, all], with zeros behind it, as long as the room."""
        if self.room is None or self.rows is None:
            return bias
        zeros = work.editor.constant(np.zeros(7, np.int64))
        lacking = work.integers("lacking", "Sub", [self.rows, self.after], 1)
        pads = work.integers("pads", "Concat", [zeros, lacking], 8, axis=0)
        return work.add("bias_room", "Pad", [bias, pads], bias, [*work.axes(bias)[:-1], work.axes(self.room)[0]])


class Lengths:
    """The inputs for the lengths of a graph's caches: one for all that are as long."""

    def __init__(
        self, editor: Editor, sizes: Sizes, pasts: Collection[ir.Value], states: Collection[str], has_room: bool
    ) -> None:
        self._editor, self._sizes, self._kept, self._has_room = editor, sizes, states, has_room
        self._filled: dict[Size, Filled] = {}
        self._states: dict[str, list[str]] = {}
        # Pasts may have room behind their rows, and so say no size.
        known = (value for value in editor.graph.inputs if sizes.of(value) is not None and value not in pasts)
        self.read: tuple[ir.Value, ...] = tuple(known)

    @property
    def filled(self) -> list[Filled]:
        """The filled rows of all caches that are in place."""
        return [filled for filled in self._filled.values() if self._states.get(filled.input.name or "")]

    def of(self, cache: Cache) -> Filled:
        """The filled rows of a cache. Raises NotFusedError if no input says how many a request adds."""
        past, new, present = (self._sizes.axes(value) for value in (cache.past, cache.new, cache.present))
        if past is None or new is None or present is None or not self._sizes.differ:
            raise NotFusedError("the length of its cache can't be told apart from other sizes")
        if past[ROWS].fixed is not None or present[ROWS].fixed is not None or past[ROWS].size == new[-2].size:
            raise NotFusedError("the length of its cache can't be told apart from other sizes")
        if past[ROWS].size not in self._filled:
            self._filled[past[ROWS].size] = self._add(past[ROWS], new, present[ROWS])
        return self._filled[past[ROWS].size]

    def _add(self, past: Axis, new: Sequence[Axis], total: Axis) -> Filled:
        graph, tokens = self._editor.graph, new[-2]
        step: int | tuple[str, int] | None = tokens.fixed
        if step is None:
            step = self._place_of(tokens)
        several = tokens.fixed != 1 and new[0].fixed != 1
        if several and graph.opset_imports.get("", 1) < OPSET:
            raise NotFusedError(
                f"the model's opset is below {OPSET}, whose operators a batch would need: export it with a later one"
            )
        if step is None:
            raise NotFusedError("no axis of an input is the number of tokens that a request adds to its cache")
        name = unused_name(NAME, self._sizes.shapes)
        value = ir.Value(name=name, type=ir.TensorType(ir.DataType.BOOL))
        graph.inputs.append(value)
        is_to_say_a_size(value)
        # A symbol that is a number may have any size, and is taken for the number where sizes are planned.
        second = Axis((0, 0), ir.SymbolicDim("0"), 0) if several else fixed_axis(0)
        self._sizes.put(value, [past, second])
        room = self._add_room(total) if self._has_room else None
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
        """The input for the room, which is as large as what is filled where sizes are planned."""
        name = unused_name(ROOM, self._sizes.shapes)
        room = ir.Value(name=name, type=ir.TensorType(ir.DataType.BOOL))
        self._editor.graph.inputs.append(room)
        is_to_say_a_size(room)
        planned, probe = total.size
        # A symbol is an expression, in which a prime can't be.
        symbol = ir.SymbolicDim(name.replace("'", "_"))
        self._sizes.put(room, [Axis((planned, probe + APART * (1 + len(self._filled))), symbol), fixed_axis(0)])
        return room

    def _place_of(self, axis: Axis) -> tuple[str, int] | None:
        """The first axis that has this size, of an input that each request gives."""
        for value in (value for value in self.read if value.name not in self._kept):
            for place, own in enumerate(self._sizes.axes(value) or ()):
                if own.size == axis.size:
                    return value.name or "", place
        return None

    def writer(self, at: ir.Node, *filled: Filled) -> Writer:
        """Writes sizes at a node that only inputs are known to come before."""
        known = {size: value for one in filled for size, value in one.known.items()}
        return Writer(at, at.outputs[0].name or "", self.read, self._editor, self._sizes, known=known)

    def rewrite_sizes(self, values: Iterable[ir.Value], filled: Filled) -> None:
        """Nodes that read sizes of these values get them from elsewhere."""
        for value in values:
            for node in size_readers(value):
                axes = sizes_read(node, self._sizes)
                assert axes is not None
                sizes = self.writer(node, filled).list_of(axes, "sizes")
                node.outputs[0].replace_all_uses_with(sizes)

    def check_sizes(self, values: Iterable[ir.Value], filled: Filled) -> None:
        """Raise NotFusedError if `rewrite_sizes` can't."""
        for value in values:
            for node in size_readers(value):
                axes = sizes_read(node, self._sizes)
                if node.outputs[0].is_graph_output() or not axes:
                    raise NotFusedError("a node reads the shape of its cache in a way that splitc does not know")
                if not all(map(self.writer(node, filled).has, axes)):
                    raise NotFusedError("a node reads a size off its cache that no input has")

    def are_in_place(self, caches: Iterable[Cache], filled: Filled) -> None:
        """Note the caches that have this length."""
        names = self._states.setdefault(filled.input.name or "", [])
        for cache in caches:
            names.append(cache.past.name or "")
            give_room(cache.past, ROWS)

    def entries(self) -> tuple[Length, ...]:
        """What the runtime is told. Inputs for caches that are none in place are removed."""
        for filled in self._filled.values():
            if not self._states.get(filled.input.name or ""):
                filled.work.undo()
        remove_unused_inputs(self._editor.graph, [own for filled in self._filled.values() for own in filled.inputs])
        return tuple(filled.entry(self._states[filled.input.name or ""]) for filled in self.filled)


def _add_int32(work: Writer, after: ir.Value, counted: ir.Value, batch: Axis) -> tuple[ir.Value, ir.Value]:
    """A number of rows as the operator takes it, and the last one filled for each row of the batch."""
    total = work.integers("total", "Cast", [counted], 1, to=ir.DataType.INT32)
    filled = total if counted is after else work.integers("filled", "Cast", [after], 1, to=ir.DataType.INT32)
    for value in (total, filled):
        value.type = ir.TensorType(ir.DataType.INT32)
    last = work.add("last", "Sub", [filled, work.editor.constant(np.array([1], np.int32))], filled, [fixed_axis(1)])
    return total, work.expanded(last, [batch], "lasts")


def sizes_read(node: ir.Node, sizes: Sizes) -> list[Axis] | None:
    """The axes whose sizes a Shape gives; None if they are not known."""
    axes = None if node.inputs[0] is None else sizes.axes(node.inputs[0])
    return None if axes is None else given_sizes(node, axes)
