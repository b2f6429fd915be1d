"""Nodes that compute which rows of an attention's KV caches a request writes, and which ones each query sees.

Row counts are one-element lists. They are computed from shapes, so ONNX Runtime keeps them on the CPU.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import wraps
from typing import Any, TypeVar

import numpy as np
import onnx_ir as ir

from splitc.compiler.caches.grouped import LASTS, PASTS, POSITIONS, QUERY, TOTAL
from splitc.compiler.engine_graphs.attention_nodes import Attention, Nodes
from splitc.compiler.graphs.origins import described

F = TypeVar("F", bound=Callable[..., ir.Value])


def made_once(make: F) -> F:
    """Let attentions with caches of one length share the value that a method adds nodes for, by its arguments."""

    @wraps(make)
    def call(rows: Rows, *arguments: Any) -> ir.Value:
        key = (make.__name__, arguments)
        if key not in rows.shared:
            rows.shared[key] = make(rows, *arguments)
        return rows.shared[key]

    return call  # type: ignore[return-value]


@dataclass(frozen=True)
class Rows:
    """The rows of an attention's KV caches [batch, heads, rows, size], whose `sizes` are those of keys and of values.

    `shared` has the results of attentions with caches of the same length, by method and arguments.
    """

    attention: Attention
    sizes: tuple[int, int]
    nodes: Nodes
    shared: dict[Any, ir.Value]

    @property
    def window(self) -> int:
        """The sliding window: the number of rows that each query sees, its own included; 0 for all."""
        return max(0, self.attention.node.attributes.get_int("local_window_size", -1))

    def attend(self, query: ir.Value, added: Sequence[ir.Value]) -> Sequence[ir.Value]:
        """The attention of queries [batch, key heads, rows, size], and both presents.

        The keys and values in `added` [batch, heads, length, size] are written by index. If the request fills the
        caches, attention reads the whole of them. Else caches that are too short are padded first, and attention reads
        only the filled rows.
        """
        b, outputs = self.nodes, self.attention.node.outputs[:3]
        pasts = [self.attention.input(place) for place in PASTS]
        places = [self._index(self.attention.kv_heads, size) for size in self.sizes]
        pads, seen = self._pads(), self.seen()
        none, total, branches = b.editor.numbers(0), self.total(), dict[str, ir.Graph]()
        for name, is_filled in (("then_branch", True), ("else_branch", False)):
            inside, presents = b.inner(name), list[ir.Value]()
            for past, new, index in zip(pasts, added, places, strict=True):
                whole = past if is_filled else inside.one("Pad", past, pads)
                assert past is not None and whole is not None
                whole.type = past.type  # which decides whether Pad has a kernel
                presents.append(inside.one("ScatterElements", whole, index, new, axis=2))
            keys, values = presents if is_filled else (inside.cut(one, 2, none, total) for one in presents)
            rows = self.attention.attend(query, keys, values, inside, seen, self.sizes[0])
            branches[name] = inside.graph([rows, *presents], outputs)
        return b.add("If", [self._is_filled()], 3, attributes=ir.convenience.convert_attributes(branches))

    def seen(self) -> ir.Value:
        """A mask of the cache rows that each query sees: its own and earlier ones if causal, else all filled ones."""
        return self._seen(self.attention.is_causal, self.window)

    def positions(self) -> ir.Value:
        """The positions of new rows, [batch, length]."""
        given = self.attention.input(POSITIONS)
        return self.own() if given is None else self._given(given)

    @made_once
    def own(self) -> ir.Value:
        """The positions of new rows in the caches, [batch, length]."""
        return self.nodes.one("Add", self.start(), self.counted(self.new()))

    @made_once
    def start(self) -> ir.Value:
        """The position of the first new row, [batch, 1]; 0 for a first prompt, which may be padded on the right."""
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
        return self._axis(self.attention.input(QUERY), self.attention.token_axis)

    @made_once
    def total(self) -> ir.Value:
        """The number of filled rows after the request."""
        b = self.nodes
        number = b.sizes("Cast", self.attention.input(TOTAL), to=ir.DataType.INT64)
        return b.sizes("Reshape", number, b.editor.numbers(1))

    @made_once
    def by_rows(self) -> ir.Value:
        """The positions of new rows as [batch, 1, length, 1]."""
        return self.nodes.one("Unsqueeze", self.own(), self.nodes.editor.numbers(1, 3))

    def counted(self, size: ir.Value) -> ir.Value:
        """The numbers from 0 to below a size."""
        b = self.nodes
        end = b.shaped(size)
        end.type, end.shape = ir.TensorType(ir.DataType.INT64), ir.Shape([])
        return b.one("Range", b.number(0), end, b.number(1))

    def _axis(self, value: ir.Value | None, axis: int) -> ir.Value:
        """The size of an axis."""
        b = self.nodes
        return b.sizes("Gather", b.one("Shape", value), b.editor.numbers(axis))

    @made_once
    def _before(self) -> ir.Value:
        """The length of the past caches, whether filled or not."""
        return self._axis(self.attention.input(PASTS[0]), 2)

    @made_once
    def _is_filled(self) -> ir.Value:
        """Whether the request fills the past caches exactly."""
        return self.nodes.shaped(self.nodes.one("Equal", self._before(), self.total()))

    @made_once
    def _pads(self) -> ir.Value:
        """The pads that lengthen the past caches to the filled rows."""
        b, number = self.nodes, self.nodes.editor.numbers
        lacking = b.sizes("Max", b.sizes("Sub", self.total(), self._before()), number(0))
        return b.sizes("Concat", number(0, 0, 0, 0, 0, 0), lacking, number(0), count=8, axis=0)

    @made_once
    def _index(self, heads: int, size: int) -> ir.Value:
        """The indices that ScatterElements writes new rows to, [batch, heads, length, size]."""
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
        """The positions of the rows that attention reads, [all]."""
        return self.counted(self.total())

    @made_once
    def _given(self, positions: ir.Value) -> ir.Value:
        """Positions as the operator reads them: those of a first prompt count from the first one."""
        b = self.nodes
        is_first = b.one("Equal", self.new(), self.total())
        ends = [b.editor.numbers(number) for number in (0, 1)]
        first = b.cut(b.cut(positions, 0, *ends), 1, *ends)
        return b.one("Where", is_first, b.one("Add", first, self.counted(self.new())), positions)


# The position of unfilled rows: behind all others, so that no query sees them.
NEVER = 1 << 62


class WindowRows(Rows):
    """The rows of past caches as long as the sliding window (sliding_window_cache), with the new rows concatenated.

    Such a cache holds the last rows of the sequence, in order. Rows behind the filled ones are undefined.
    """

    def attend(self, query: ir.Value, added: Sequence[ir.Value]) -> Sequence[ir.Value]:
        """As in `Rows`. Attention reads past and new rows; the presents are the last rows of both."""
        b, kept = self.nodes, self._kept(self.attention.kv_heads, self.sizes[0])
        pasts = [self.attention.input(place) for place in PASTS]
        keys, values = (b.one("Concat", past, new, axis=2) for past, new in zip(pasts, added, strict=True))
        rows = self.attention.attend(query, keys, values, b, self.seen(), self.sizes[0])
        zero = b.editor.scalar(0, described(self.attention.node.outputs[0]))
        presents = (b.one("GatherElements", whole, kept, axis=2) for whole in (keys, values))
        # The operator leaves unfilled rows undefined. Zeros make runs comparable.
        return rows, *(b.one("Where", self._is_set(), one, zero) for one in presents)

    @made_once
    def places(self) -> ir.Value:
        """The positions of past and new rows, [batch, 1, 1, all]."""
        b, start = self.nodes, self.start()
        before = b.one("Add", self._evicted(), self._window_rows())
        before = b.one("Where", b.one("Less", before, start), before, b.editor.numbers(NEVER))
        return b.one("Unsqueeze", b.one("Concat", before, self.own(), axis=1), b.editor.numbers(1, 2))

    @made_once
    def _evicted(self) -> ir.Value:
        """The position of the first row of the past caches, [batch, 1]: the number of evicted rows."""
        return self._beyond(self.start())

    def _beyond(self, count: ir.Value) -> ir.Value:
        """By how much a number of positions exceeds the window."""
        b, number = self.nodes, self.nodes.editor.numbers
        return b.one("Max", b.one("Sub", count, number(self.window)), number(0))

    def _window_rows(self) -> ir.Value:
        return self.nodes.editor.constant(np.arange(self.window, dtype=np.int64))

    @made_once
    def _filled(self) -> ir.Value:
        """The number of positions so far, [batch, 1]."""
        return self.nodes.shaped(self.nodes.one("Add", self.last(), self.nodes.editor.numbers(1)), -1, 1)

    @made_once
    def _is_set(self) -> ir.Value:
        """A mask of the filled rows of the presents, [batch, 1, window, 1]."""
        b = self.nodes
        return b.one("Unsqueeze", b.one("Less", self._window_rows(), self._filled()), b.editor.numbers(1, 3))

    @made_once
    def _kept(self, heads: int, size: int) -> ir.Value:
        """The indices of the presents' rows among past and new ones, [batch, heads, window, size]."""
        b, number = self.nodes, self.nodes.editor.numbers
        position = b.one("Add", self._beyond(self._filled()), self._window_rows())
        held = b.one("Sub", position, self._evicted())
        new = b.one("Add", b.one("Sub", position, self.start()), number(self.window))
        row = b.one("Where", b.one("Less", position, self.start()), held, new)
        # Indices of unfilled rows only have to be valid.
        end = b.sizes("Add", self.new(), number(self.window - 1))
        row = b.one("Unsqueeze", b.one("Min", row, end), number(1, 3))
        return b.one("Expand", row, self.shape_of(heads, number(self.window), size))
