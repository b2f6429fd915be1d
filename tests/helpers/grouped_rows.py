"""Mixtures of experts whose rows are sorted by their expert, as PyTorch's `_grouped_mm` is exported."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import onnx_ir as ir

from tests.helpers.blocks import Block


@dataclass(frozen=True)
class Grouped:
    """How the mixture is written.

    - `biased`: each expert adds a bias. `apart`: each Range has Squeezes of its own.
    - `odd`: "gap": a Range begins after the end before; "order": two experts' results are exchanged; "rows": an expert
      reads other rows; "lengths": parts of the matrices are not of one length each.
    """

    biased: bool = False
    apart: bool = False
    odd: str = ""
    experts: int = 4
    chosen: int = 2
    wide: int = 16
    inner: int = 24
    columns: int = 40


def write(how: Grouped = Grouped()) -> Block:
    """A model of ids, a mixture after a table, and logits."""
    b = Block(18)
    ids = b.indices("ids", [[3, 1, 4, 1, 5]], ["n", "t"])
    x = b.op("Gather", b.w("table", how.columns, how.wide), ids)
    h = b.op("Reshape", x, b.ints(-1, how.wide))
    scores = b.op("Softmax", b.op("MatMul", h, b.w("router", how.wide, how.experts)))
    shares, numbers = b.ops("TopK", scores, b.ints(how.chosen), outputs=2)
    flat = b.op("Reshape", numbers, b.ints(-1))
    experts, places = b.ops("TopK", flat, b.op("Shape", flat), outputs=2, largest=0)
    ones = b.op("Expand", b.ints(1), b.op("Shape", experts))
    zeros = b.weight("zeros", ir.tensor(np.zeros(how.experts, np.int64)))
    ends = b.op("CumSum", b.op("ScatterElements", zeros, experts, ones, reduction="add"), b.constant(0, np.int64))
    rows = b.op("Gather", h, b.op("Div", places, b.constant(how.chosen, np.int64)))
    made = b.op("Tanh", product(b, how, rows, ends, "first", how.wide, how.inner))
    made = product(b, how, made, ends, "second", how.inner, how.wide)
    own = b.op("Gather", b.op("Reshape", shares, b.ints(-1)), places)
    made = b.op("Mul", made, b.op("Unsqueeze", own, b.ints(1)))
    none, one = b.constant(0, np.int64), b.constant(1, np.int64)
    order = b.op("Range", none, b.op("Squeeze", b.op("Shape", places), b.ints(0)), one)
    back = b.op("Gather", made, b.op("ScatterElements", places, places, order))
    mixed = b.op("ReduceSum", b.op("Reshape", back, b.ints(-1, how.chosen, how.wide)), b.ints(1), keepdims=0)
    x = b.op("Add", x, b.op("Reshape", mixed, b.op("Shape", x)))
    b.give(b.op("MatMul", x, b.w("head", how.wide, how.columns)), "logits", ["n", "t", how.columns])
    return b


def product(b: Block, how: Grouped, rows: ir.Value, ends: ir.Value, name: str, inner: int, columns: int) -> ir.Value:
    """Each row times its expert's matrix."""
    first, one = b.ints(0), b.constant(1, np.int64)
    parts = b.ops("Split", ends, outputs=how.experts, axis=0, num_outputs=how.experts)
    matrices = b.w(f"{name}.weight", how.experts, inner, columns)
    lengths = [] if how.odd != "lengths" else [b.ints(*[1] * how.experts)]
    counts = {} if lengths else {"num_outputs": how.experts}
    stack = b.ops("Split", matrices, *lengths, outputs=how.experts, axis=0, **counts)
    biases = b.ops("Split", b.w(f"{name}.bias", how.experts, columns), outputs=how.experts, axis=0, **counts)
    limits = [b.op("Squeeze", part, first) for part in parts]
    begins = [b.constant(1 if how.odd == "gap" else 0, np.int64), *limits[:-1]]
    if how.apart:
        begins = [b.op("Squeeze", part, first) for part in (b.ints(0), *parts[:-1])]
    made = []
    for number in range(how.experts):
        span = b.op("Range", begins[number], limits[number], one)
        source = b.op("Abs", rows) if how.odd == "rows" and number == 2 else rows
        result = b.op("MatMul", b.op("Gather", source, span, axis=0), b.op("Squeeze", stack[number], first))
        made.append(b.op("Add", result, b.op("Squeeze", biases[number], first)) if how.biased else result)
    if how.odd == "order":
        made[1], made[2] = made[2], made[1]
    return b.op("Concat", *made, axis=0)
