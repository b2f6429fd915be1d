"""Small mixtures of experts, in all forms that exporters write, behind a table of many rows."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx_ir as ir

from models.writer import save
from tests.conftest import Arrays
from tests.helpers.blocks import Block

ROWS, WIDE, INNER, EXPERTS, CHOSEN = 400, 32, 48, 4, 2


def mixture(form: str, layers: int = 2) -> Block:
    """Tokens through a table, layers of attention and a mixture of this form, and a head."""
    b = Block()
    ids = b.indices("ids", [[3, 1, 4, 1, 5]], ["n", "t"])
    x = b.op("Gather", b.w("table", ROWS, WIDE), ids)
    for number in range(layers):
        with b.scope(f"layers.{number}"):
            x = b.op("Add", x, attention(b, normed(b, x), f"layers.{number}.attention"))
            h = b.op("Reshape", normed(b, x), b.ints(-1, WIDE))
            with b.scope("mixture"):
                made = FORMS[form](b, h, f"layers.{number}.mixture")
            up, down = b.w(f"layers.{number}.up", WIDE, 40), b.w(f"layers.{number}.down", 40, WIDE)
            shared = b.op("MatMul", b.op("Tanh", b.op("MatMul", h, up)), down)
            x = b.op("Add", x, b.op("Reshape", b.op("Add", made, shared), b.op("Shape", x)))
    b.give(b.op("MatMul", normed(b, x), b.w("head", WIDE, ROWS)), "logits", ["n", "t", ROWS])
    return b


def save_mixture(folder: Path, form: str, layers: int = 2) -> Path:
    save(mixture(form, layers).model(), folder / "model.onnx")
    return folder / "model.onnx"


def mixture_feeds(length: int = 5, rows: int = 1, last: int = 7) -> Arrays:
    ids = np.random.default_rng(length).integers(0, ROWS, (rows, length))
    ids[0, -1] = last
    return {"ids": ids}


def normed(b: Block, x: ir.Value) -> ir.Value:
    scale, bias = b.w(f"norm{x.name}", WIDE), b.w(f"bias{x.name}", WIDE)
    return b.op("LayerNormalization", x, scale, bias)


def attention(b: Block, x: ir.Value, name: str) -> ir.Value:
    q, k, v = (b.op("MatMul", x, b.w(f"{name}.{part}", WIDE, WIDE)) for part in "qkv")
    scores = b.op("Softmax", b.op("MatMul", q, b.op("Transpose", k, perm=[0, 2, 1])))
    return b.op("MatMul", b.op("MatMul", scores, v), b.w(f"{name}.o", WIDE, WIDE))


def scores_of(b: Block, h: ir.Value, name: str) -> ir.Value:
    return b.op("Softmax", b.op("MatMul", h, b.w(f"{name}.router", WIDE, EXPERTS)))


def chosen_by(b: Block, h: ir.Value, name: str) -> tuple[ir.Value, ir.Value]:
    """The shares of the chosen experts, and their numbers."""
    shares, numbers = b.ops("TopK", scores_of(b, h, name), b.ints(CHOSEN), outputs=2)
    return b.op("Div", shares, b.op("ReduceSum", shares, b.ints(-1))), numbers


def fused(b: Block, h: ir.Value, name: str) -> ir.Value:
    weights = b.w(f"{name}.first", EXPERTS, INNER, WIDE), None, b.w(f"{name}.second", EXPERTS, WIDE, INNER)
    return b.op("com.microsoft.MoE", h, scores_of(b, h, name), *weights, k=CHOSEN, activation_type="relu")


def quantized(b: Block, h: ir.Value, name: str) -> ir.Value:
    """Two weights of 4 bits in a byte."""
    first, second = (
        b.weight(f"{name}.{part}", ir.tensor((np.abs(b.random(name + part, EXPERTS, *shape)) * 99).astype(np.uint8)))
        for part, shape in (("first", (INNER, WIDE // 2)), ("second", (WIDE, INNER // 2)))
    )
    scales = [
        b.weight(f"{name}.scale{rows}", ir.tensor(np.full((EXPERTS, rows), 0.01, np.float32))) for rows in (INNER, WIDE)
    ]
    ends = first, scales[0], None, second, scales[1]
    router = scores_of(b, h, name)
    return b.op("com.microsoft.QMoE", h, router, *ends, k=CHOSEN, expert_weight_bits=4, activation_type="relu")


def expert(b: Block, rows: ir.Value, name: str, number: int) -> ir.Value:
    first, second = b.w(f"{name}.{number}.first", WIDE, INNER), b.w(f"{name}.{number}.second", INNER, WIDE)
    return b.op("MatMul", b.op("Tanh", b.op("MatMul", rows, first)), second)


def loop(b: Block, h: ir.Value, name: str) -> ir.Value:
    """Each expert takes the tokens that chose it, and adds what it makes to their rows."""
    shares, numbers = chosen_by(b, h, name)
    total = b.op("Mul", h, b.constant(0, np.float32))
    for number in range(EXPERTS):
        places = b.op("NonZero", b.op("Equal", numbers, b.constant(number, np.int64)))
        rows, _ = b.ops("Split", places, axis=0, outputs=2)
        rows, pairs = b.op("Squeeze", rows, b.ints(0)), b.op("Transpose", places, perm=[1, 0])
        share = b.op("Unsqueeze", b.op("GatherND", shares, pairs), b.ints(1))
        made = b.op("Mul", expert(b, b.op("Gather", h, rows), name, number), share)
        before = b.op("Gather", total, rows)
        total = b.op("ScatterND", total, b.op("Unsqueeze", rows, b.ints(1)), b.op("Add", before, made))
    return total


def dense(b: Block, h: ir.Value, name: str) -> ir.Value:
    """Each expert takes all tokens, and what it makes of those that did not choose it is dropped."""
    shares, numbers = chosen_by(b, h, name)
    parts = []
    for number in range(EXPERTS):
        chose = b.op("Equal", numbers, b.constant(number, np.int64))
        share = b.op("ReduceSum", b.op("Where", chose, shares, b.constant(0, np.float32)), b.ints(-1))
        parts.append(b.op("Mul", expert(b, h, name, number), share))
    return b.op("Sum", *parts)


def gathered(b: Block, h: ir.Value, name: str) -> ir.Value:
    """The chosen experts' matrices are gathered for each token."""
    shares, numbers = chosen_by(b, h, name)
    rows = b.op("Unsqueeze", b.op("Unsqueeze", h, b.ints(1)), b.ints(2))
    first = b.op("Gather", b.w(f"{name}.first", EXPERTS, WIDE, INNER), numbers)
    second = b.op("Gather", b.w(f"{name}.second", EXPERTS, INNER, WIDE), numbers)
    made = b.op("MatMul", b.op("Tanh", b.op("MatMul", rows, first)), second)
    weighed = b.op("Mul", b.op("Squeeze", made, b.ints(2)), b.op("Unsqueeze", shares, b.ints(-1)))
    return b.op("ReduceSum", weighed, b.ints(1), keepdims=0)


def stacked(b: Block, h: ir.Value, name: str) -> ir.Value:
    """All experts take all tokens in one product with an axis of experts, and the router's shares weigh the results."""
    shares, numbers = chosen_by(b, h, name)
    zeros = b.op("Mul", scores_of(b, h, name), b.constant(0, np.float32))
    weights = b.op("ScatterElements", zeros, numbers, shares, axis=1)
    weights = b.op("Unsqueeze", b.op("Transpose", weights, perm=[1, 0]), b.ints(-1))
    inner = b.op("Tanh", b.op("MatMul", b.op("Unsqueeze", h, b.ints(0)), b.w(f"{name}.first", EXPERTS, WIDE, INNER)))
    made = b.op("Mul", b.op("MatMul", inner, b.w(f"{name}.second", EXPERTS, INNER, WIDE)), weights)
    return b.op("ReduceSum", made, b.ints(0), keepdims=0)


FORMS: dict[str, Callable[[Block, ir.Value, str], ir.Value]] = {
    "fused": fused,
    "quantized": quantized,
    "loop": loop,
    "dense": dense,
    "gathered": gathered,
    "stacked": stacked,
}
