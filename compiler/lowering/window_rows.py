"""As `cache_rows`, for KV caches as long as the sliding window (sliding_window_cache of GroupQueryAttention).

Such a cache holds the last rows of the sequence, in order. Rows behind the filled ones are undefined.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import onnx_ir as ir

from splitc.compiler.frontend.origins import described
from splitc.compiler.fusion.grouped import PASTS
from splitc.compiler.lowering.cache_rows import Rows, made_once

# The position of unfilled rows: behind all others, so that no query sees them.
NEVER = 1 << 62


class WindowRows(Rows):
    """The rows of the past caches, with the new rows concatenated."""

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
