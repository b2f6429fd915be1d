"""Mixtures of experts whose rows are sorted by their expert, as PyTorch's `_grouped_mm` is exported."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import onnx_ir as ir

from tests.helpers.blocks import Block

# Activations without a gate.
PLAIN = ("tanh", "relu", "silu", "gelu")
# The factor in a gate's Sigmoid, and what is added to values, as of gpt-oss.
ALPHA, BETA = 1.702, 1.0


@dataclass(frozen=True)
class Grouped:
    """How the mixture is written.

    - `biased`: each expert adds a bias. `apart`: each Range has Squeezes of its own.
    - `activation`: what is between both products: "tanh", "relu", "silu", "gelu", or a gate, see `activated`.
    - `limit`: the largest of clamped gates and values.
    - `looked_up`: biases of both products that are looked up by the rows' experts; "wrong": by those of others.
    - `precise`: results are scaled and added in float32.
    - `normed`: rows are normed before, so that shards have whole ones. `dtype`: the type of all weights.
    - `odd`: "gap": a Range begins after the end before; "order": two experts' results are exchanged; "rows": an expert
      reads other rows; "lengths": parts of the matrices are not of one length each; "back": results are brought back
      in another order.
    """

    biased: bool = False
    activation: str = "tanh"
    limit: float = 0.5
    looked_up: str = ""
    precise: bool = False
    normed: bool = False
    dtype: ir.DataType = ir.DataType.FLOAT
    apart: bool = False
    odd: str = ""
    experts: int = 4
    chosen: int = 2
    wide: int = 16
    inner: int = 24
    columns: int = 40

    @property
    def first(self) -> int:
        """The columns of the first product."""
        return self.inner * (1 if self.activation in PLAIN else 2)

    def weight(self, b: Block, name: str, *shape: int) -> ir.Value:
        return b.weight(name, ir.tensor(b.random(name, *shape).astype(self.dtype.numpy()), self.dtype))


def write(how: Grouped = Grouped()) -> Block:
    """A model of ids, a mixture after a table, and logits."""
    b = Block(18)
    ids = b.indices("ids", [[3, 1, 4, 1, 5]], ["n", "t"])
    x = b.op("Gather", how.weight(b, "table", how.columns, how.wide), ids)
    normed = b.op("LayerNormalization", x, how.weight(b, "scale", how.wide)) if how.normed else x
    h = b.op("Reshape", normed, b.ints(-1, how.wide))
    scores = b.op("Softmax", b.op("MatMul", h, how.weight(b, "router", how.wide, how.experts)))
    shares, numbers = b.ops("TopK", scores, b.ints(how.chosen), outputs=2)
    flat = b.op("Reshape", numbers, b.ints(-1))
    experts, places = b.ops("TopK", flat, b.op("Shape", flat), outputs=2, largest=0)
    ones = b.op("Expand", b.ints(1), b.op("Shape", experts))
    zeros = b.weight("zeros", ir.tensor(np.zeros(how.experts, np.int64)))
    ends = b.op("CumSum", b.op("ScatterElements", zeros, experts, ones, reduction="add"), b.constant(0, np.int64))
    rows = b.op("Gather", h, b.op("Div", places, b.constant(how.chosen, np.int64)))
    made = product(b, how, rows, ends, "first", how.wide, how.first)
    if how.looked_up:
        numbers = (
            experts if how.looked_up != "wrong" else b.op("Mod", b.op("Add", experts, b.ints(1)), b.ints(how.experts))
        )
        places_of = b.op("Unsqueeze", numbers, b.ints(-1))
        made = b.op("Add", made, b.op("GatherND", how.weight(b, "first.bias", how.experts, how.first), places_of))
    made = product(b, how, activated(b, how, made), ends, "second", how.inner, how.wide)
    if how.looked_up:
        made = b.op("Add", made, b.op("GatherND", how.weight(b, "second.bias", how.experts, how.wide), places_of))
    if how.precise:
        made, shares = (b.op("Cast", value, to=ir.DataType.FLOAT) for value in (made, shares))
    own = b.op("Gather", b.op("Reshape", shares, b.ints(-1)), places)
    made = b.op("Mul", made, b.op("Unsqueeze", own, b.ints(1)))
    none, one = b.constant(0, np.int64), b.constant(1, np.int64)
    order = b.op("Range", none, b.op("Squeeze", b.op("Shape", places), b.ints(0)), one)
    back = b.op("Gather", made, places if how.odd == "back" else b.op("ScatterElements", places, places, order))
    mixed = b.op("ReduceSum", b.op("Reshape", back, b.ints(-1, how.chosen, how.wide)), b.ints(1), keepdims=0)
    mixed = b.op("Cast", mixed, to=how.dtype) if how.precise else mixed
    x = b.op("Add", x, b.op("Reshape", mixed, b.op("Shape", x)))
    b.give(
        b.op("MatMul", x, how.weight(b, "head", how.wide, how.columns)), "logits", ["n", "t", how.columns], how.dtype
    )
    return b


def product(b: Block, how: Grouped, rows: ir.Value, ends: ir.Value, name: str, inner: int, columns: int) -> ir.Value:
    """Each row times its expert's matrix."""
    first, one = b.ints(0), b.constant(1, np.int64)
    parts = b.ops("Split", ends, outputs=how.experts, axis=0, num_outputs=how.experts)
    matrices = how.weight(b, f"{name}.weight", how.experts, inner, columns)
    lengths = [] if how.odd != "lengths" else [b.ints(*[1] * how.experts)]
    counts = {} if lengths else {"num_outputs": how.experts}
    stack = b.ops("Split", matrices, *lengths, outputs=how.experts, axis=0, **counts)
    biases = b.ops("Split", how.weight(b, f"{name}.bias", how.experts, columns), outputs=how.experts, axis=0, **counts)
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


def activated(b: Block, how: Grouped, made: ir.Value) -> ir.Value:
    """The activation. Gates are the "first" or "last" half, or "even" or "odd"; "clamped" ones are even."""

    def number(value: float) -> ir.Value:
        return b.constant(value, how.dtype.numpy())

    def swish(gate: ir.Value, factor: float | None = None) -> ir.Value:
        return b.op("Mul", gate, b.op("Sigmoid", gate if factor is None else b.op("Mul", gate, number(factor))))

    def columns(start: int, end: int, step: int = 1) -> ir.Value:
        return b.op("Slice", made, b.ints(start), b.ints(end), b.ints(1), b.ints(step))

    if how.activation == "silu":
        return swish(made)
    if how.activation == "gelu":
        erf = b.op("Erf", b.op("Div", made, number(2**0.5)))
        return b.op("Mul", b.op("Mul", made, number(0.5)), b.op("Add", erf, number(1.0)))
    if how.activation in PLAIN:
        return b.op(how.activation.capitalize(), made)
    if how.activation in ("first", "last"):
        halves = columns(0, how.inner), columns(how.inner, 2 * how.inner)
        gate, value = halves if how.activation == "first" else halves[::-1]
        return b.op("Mul", swish(gate), value)
    even, odd = columns(0, 1 << 40, 2), columns(1, 1 << 40, 2)
    if how.activation == "clamped":
        gate, value = b.op("Min", even, number(how.limit)), b.op("Clip", odd, number(-how.limit), number(how.limit))
        return b.op("Mul", b.op("Add", value, number(BETA)), swish(gate, ALPHA))
    return b.op("Mul", even, swish(odd)) if how.activation == "odd" else b.op("Mul", swish(even), odd)
