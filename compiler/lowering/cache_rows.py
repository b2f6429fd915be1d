"""The rows of attention's caches in a request, as nodes of a graph: their number, the places of new ones, masks.

Numbers of rows are lists of one size. They follow from sizes, and stay on the CPU.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import wraps
from typing import Any, TypeVar

import numpy as np
import onnx_ir as ir

from splitc.compiler.lowering.attention_nodes import LASTS, PASTS, POSITIONS, QUERY, TOTAL, Attention, Nodes

F = TypeVar("F", bound=Callable[..., ir.Value])


def made_once(make: F) -> F:
    """Let a method make its nodes once for all attentions whose caches are as long, and the same arguments."""

    @wraps(make)
    def call(rows: Rows, *arguments: Any) -> ir.Value:
        key = (make.__name__, arguments)
        if key not in rows.shared:
            rows.shared[key] = make(rows, *arguments)
        return rows.shared[key]

    return call  # type: ignore[return-value]


@dataclass(frozen=True)
class Rows:
    """The rows of an attention's caches, for heads of this size.

    `shared` has what earlier attentions made whose caches are as long.
    """

    attention: Attention
    size: int
    nodes: Nodes
    shared: dict[Any, ir.Value]

    @property
    def window(self) -> int:
        """How many rows each new one sees, itself included, if that is limited."""
        return max(0, self.attention.node.attributes.get_int("local_window_size", -1))

    def attend(self, query: ir.Value, added: Sequence[ir.Value]) -> Sequence[ir.Value]:
        """The product of all weights and values for queries [batch, key heads, rows, size], and both presents.

        Rows [batch, heads, length, size] are added in place if that fills the caches, as masks that are as long as
        their room say. Caches are lengthened first where they are too short, and only filled rows are read where there
        is more room.
        """
        b, outputs = self.nodes, self.attention.node.outputs[:3]
        pasts = [self.attention.input(place) for place in PASTS]
        index, pads, seen = self._index(self.attention.kv_heads, self.size), self._pads(), self.seen()
        none, total, branches = b.editor.numbers(0), self.total(), dict[str, ir.Graph]()
        for name, is_filled in (("then_branch", True), ("else_branch", False)):
            inside, presents = b.inner(name), list[ir.Value]()
            for past, new in zip(pasts, added, strict=True):
                whole = past if is_filled else inside.one("Pad", past, pads)
                presents.append(inside.one("ScatterElements", whole, index, new, axis=2))
            keys, values = presents if is_filled else (inside.cut(one, 2, none, total) for one in presents)
            rows = self.attention.attend(query, keys, values, inside, seen, self.size)
            branches[name] = inside.graph([rows, *presents], outputs)
        return b.add("If", [self._is_filled()], 3, attributes=ir.convenience.convert_attributes(branches))

    def seen(self) -> ir.Value:
        """Which rows of the caches each new row sees: all that are filled, or its own and earlier ones."""
        return self._seen(self.attention.is_causal, self.window)

    def positions(self) -> ir.Value:
        """The positions of new rows, [batch, length]."""
        given = self.attention.input(POSITIONS)
        return self.own() if given is None else self._given(given)

    @made_once
    def own(self) -> ir.Value:
        """The positions of new rows behind those before, [batch, length]."""
        return self.nodes.one("Add", self.start(), self.counted(self.new()))

    @made_once
    def start(self) -> ir.Value:
        """The position of the first new row, [batch, 1]. A first prompt may be padded at its end."""
        b, number = self.nodes, self.nodes.editor.numbers
        before = b.one("Sub", self.last(), b.sizes("Sub", self.new(), number(1)))
        return b.shaped(b.one("Max", before, number(0)), -1, 1)

    @made_once
    def last(self) -> ir.Value:
        """The last position that is filled, for each row of the batch."""
        return self.nodes.one("Cast", self.attention.input(LASTS), to=ir.DataType.INT64)

    @made_once
    def new(self) -> ir.Value:
        """The number of new rows."""
        return self._axis(self.attention.input(QUERY), 1)

    @made_once
    def total(self) -> ir.Value:
        """The number of rows that are filled afterwards."""
        b = self.nodes
        number = b.sizes("Cast", self.attention.input(TOTAL), to=ir.DataType.INT64)
        return b.sizes("Reshape", number, b.editor.numbers(1))

    @made_once
    def by_rows(self) -> ir.Value:
        """The positions of new rows as [batch, 1, length, 1]."""
        return self.nodes.one("Unsqueeze", self.own(), self.nodes.editor.numbers(1, 3))

    def counted(self, size: ir.Value) -> ir.Value:
        """0, 1, and so on below a size."""
        b = self.nodes
        end = b.shaped(size)
        end.type, end.shape = ir.TensorType(ir.DataType.INT64), ir.Shape([])
        return b.one("Range", self._number(0), end, self._number(1))

    def _number(self, number: int) -> ir.Value:
        return self.nodes.editor.constant(np.array(number, np.int64))

    def _axis(self, value: ir.Value | None, axis: int) -> ir.Value:
        """The size of an axis."""
        b = self.nodes
        return b.sizes("Gather", b.one("Shape", value), b.editor.numbers(axis))

    @made_once
    def _before(self) -> ir.Value:
        """The rows of the caches before, room included."""
        return self._axis(self.attention.input(PASTS[0]), 2)

    @made_once
    def _is_filled(self) -> ir.Value:
        """Whether the request fills the caches."""
        return self.nodes.shaped(self.nodes.one("Equal", self._before(), self.total()))

    @made_once
    def _pads(self) -> ir.Value:
        """What lengthens the caches."""
        b, number = self.nodes, self.nodes.editor.numbers
        lacking = b.sizes("Max", b.sizes("Sub", self.total(), self._before()), number(0))
        return b.sizes("Concat", number(0, 0, 0, 0, 0, 0), lacking, number(0), count=8, axis=0)

    @made_once
    def _index(self, heads: int, size: int) -> ir.Value:
        """The places in the caches of new rows [batch, heads, length, size]."""
        return self.nodes.one("Expand", self.by_rows(), self.shape_of(heads, self.new(), size))

    def shape_of(self, heads: int, rows: ir.Value, size: int) -> ir.Value:
        """[batch, heads, rows, size] as a list."""
        b = self.nodes
        batch = self._axis(self.attention.input(QUERY), 0)
        return b.sizes("Concat", batch, b.editor.numbers(heads), rows, b.editor.numbers(size), count=4, axis=0)

    @made_once
    def _seen(self, is_causal: bool, window: int) -> ir.Value:
        b, places = self.nodes, self.places()
        if not is_causal:
            return b.one("GreaterOrEqual", b.shaped(self.last(), -1, 1, 1, 1), places)
        seen = b.one("GreaterOrEqual", self.by_rows(), places)
        if not window:
            return seen
        distance = b.one("Sub", self.by_rows(), places)
        return b.one("And", seen, b.one("Less", distance, b.editor.numbers(window)))

    @made_once
    def places(self) -> ir.Value:
        """The places of the caches that are filled, or say so."""
        return self.counted(self.total())

    @made_once
    def _given(self, positions: ir.Value) -> ir.Value:
        """Positions as the operator takes them: a first prompt begins at the first one."""
        b = self.nodes
        is_first = b.one("Equal", self.new(), self.total())
        ends = [b.editor.numbers(number) for number in (0, 1)]
        first = b.cut(b.cut(positions, 0, *ends), 1, *ends)
        return b.one("Where", is_first, b.one("Add", first, self.counted(self.new())), positions)
