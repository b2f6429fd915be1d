"""A recurrent model."""

from __future__ import annotations

from pathlib import Path

from models.writer import save
from tests.helpers.blocks import Block


def write_lstm(model: Path) -> None:
    """An LSTM of one step: from x, h and c to y, hn and cn."""
    b = Block()
    x = b.data("x", (3, 2, 6), ["t", "n", 6])
    states = [b.data(name, (1, 2, 5), [1, "n", 5]) for name in ("h", "c")]
    wide, deep = b.w("W", 1, 20, 6), b.w("R", 1, 20, 5)
    outputs = b.ops("LSTM", x, wide, deep, None, None, *states, outputs=3, hidden_size=5)
    b.give(outputs[0], "y", ["t", 1, "n", 5])
    b.give(outputs[1], "hn", [1, "n", 5])
    b.give(outputs[2], "cn", [1, "n", 5])
    save(b.model(), model)
