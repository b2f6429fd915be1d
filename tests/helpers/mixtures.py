"""Small mixtures of experts, in all forms that exporters write, after an embedding table of many rows."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import numpy as np
import onnx_ir as ir
import pytest

from models.writer import save
from tests.conftest import KEPT, Arrays
from tests.helpers.blocks import Block

ROWS, WIDE, INNER, EXPERTS, CHOSEN = 400, 32, 48, 4, 2


@dataclass(frozen=True)
class Sizes:
    """Sizes: rows of the table, width of tokens, width inside an expert, number of experts, experts for each token."""

    rows: int = ROWS
    wide: int = WIDE
    inner: int = INNER
    experts: int = EXPERTS
    chosen: int = CHOSEN

    @property
    def matrices(self) -> tuple[int, int, int]:
        """The number of expert matrices, and their two sizes."""
        return self.experts, self.wide, self.inner


class Mixture(Block):
    """A writer of graphs with mixtures of these sizes."""

    def __init__(self, sizes: Sizes = Sizes()) -> None:
        super().__init__()
        self.sizes = sizes


def mixture(form: str, layers: int = 2, sizes: Sizes = Sizes()) -> Mixture:
    """A model: a table, layers of attention and a mixture of this form, and a head."""
    b = Mixture(sizes)
    ids = b.indices("ids", [[3, 1, 4, 1, 5]], ["n", "t"])
    x = b.op("Gather", b.w("table", sizes.rows, sizes.wide), ids)
    for number in range(layers):
        with b.scope(f"layers.{number}"):
            x = b.op("Add", x, attention(b, normed(b, x), f"layers.{number}.attention"))
            h = b.op("Reshape", normed(b, x), b.ints(-1, sizes.wide))
            with b.scope("mixture"):
                made = FORMS[form](b, h, f"layers.{number}.mixture")
            up, down = b.w(f"layers.{number}.up", sizes.wide, 40), b.w(f"layers.{number}.down", 40, sizes.wide)
            shared = b.op("MatMul", b.op("Tanh", b.op("MatMul", h, up)), down)
            x = b.op("Add", x, b.op("Reshape", b.op("Add", made, shared), b.op("Shape", x)))
    b.give(b.op("MatMul", normed(b, x), b.w("head", sizes.wide, sizes.rows)), "logits", ["n", "t", sizes.rows])
    return b


def save_mixture(folder: Path, form: str, layers: int = 2, sizes: Sizes = Sizes()) -> Path:
    save(mixture(form, layers, sizes).model(), folder / "model.onnx")
    return folder / "model.onnx"


# Has the arguments of `save_mixture`, but for the folder.
Mixtures = Callable[..., Path]


@pytest.fixture(scope="session")
def mixtures(tmp_path_factory: pytest.TempPathFactory) -> Mixtures:
    """Writes each mixture once, and its analyses are cached for all tests: they may not change its files."""

    @cache
    def write(form: str, layers: int = 2, sizes: Sizes = Sizes()) -> Path:
        model = save_mixture(tmp_path_factory.mktemp("mixture"), form, layers, sizes)
        KEPT.models.add(model)
        return model

    return write


def mixture_feeds(length: int = 5, rows: int = 1, last: int = 7) -> Arrays:
    ids = np.random.default_rng(length).integers(0, ROWS, (rows, length))
    ids[0, -1] = last
    return {"ids": ids}


def normed(b: Mixture, x: ir.Value) -> ir.Value:
    scale, bias = b.w(f"norm{x.name}", b.sizes.wide), b.w(f"bias{x.name}", b.sizes.wide)
    return b.op("LayerNormalization", x, scale, bias)


def attention(b: Mixture, x: ir.Value, name: str) -> ir.Value:
    q, k, v = (b.op("MatMul", x, b.w(f"{name}.{part}", b.sizes.wide, b.sizes.wide)) for part in "qkv")
    scores = b.op("Softmax", b.op("MatMul", q, b.op("Transpose", k, perm=[0, 2, 1])))
    return b.op("MatMul", b.op("MatMul", scores, v), b.w(f"{name}.o", b.sizes.wide, b.sizes.wide))


def scores_of(b: Mixture, h: ir.Value, name: str) -> ir.Value:
    return b.op("Softmax", b.op("MatMul", h, b.w(f"{name}.router", b.sizes.wide, b.sizes.experts)))


def chosen_by(b: Mixture, h: ir.Value, name: str) -> tuple[ir.Value, ir.Value]:
    """The weights of the chosen experts, and their numbers."""
    shares, numbers = b.ops("TopK", scores_of(b, h, name), b.ints(b.sizes.chosen), outputs=2)
    return b.op("Div", shares, b.op("ReduceSum", shares, b.ints(-1))), numbers


def fused(b: Mixture, h: ir.Value, name: str) -> ir.Value:
    experts, wide, inner = b.sizes.matrices
    weights = b.w(f"{name}.first", experts, inner, wide), None, b.w(f"{name}.second", experts, wide, inner)
    return b.op("com.microsoft.MoE", h, scores_of(b, h, name), *weights, k=b.sizes.chosen, activation_type="relu")


def quantized(b: Mixture, h: ir.Value, name: str) -> ir.Value:
    """The operator QMoE, with two 4-bit weights in a byte."""
    experts, wide, inner = b.sizes.matrices

    def packed(part: str, rows: int, columns: int) -> tuple[ir.Value, ir.Value]:
        numbers = np.abs(b.random(name + part, experts, rows, columns // 2) * 99).astype(np.uint8)
        scales = ir.tensor(np.full((experts, rows), 0.01, np.float32))
        return b.weight(f"{name}.{part}", ir.tensor(numbers)), b.weight(f"{name}.scale{rows}", scales)

    ends = *packed("first", inner, wide), None, *packed("second", wide, inner)
    how = {"k": b.sizes.chosen, "expert_weight_bits": 4, "activation_type": "relu"}
    return b.op("com.microsoft.QMoE", h, scores_of(b, h, name), *ends, **how)


def expert(b: Mixture, rows: ir.Value, name: str, number: int) -> ir.Value:
    _, wide, inner = b.sizes.matrices
    first, second = b.w(f"{name}.{number}.first", wide, inner), b.w(f"{name}.{number}.second", inner, wide)
    return b.op("MatMul", b.op("Tanh", b.op("MatMul", rows, first)), second)


def loop(b: Mixture, h: ir.Value, name: str) -> ir.Value:
    """Each expert runs on the tokens that chose it, and adds its results to their rows."""
    shares, numbers = chosen_by(b, h, name)
    total = b.op("Mul", h, b.constant(0, np.float32))
    for number in range(b.sizes.experts):
        places = b.op("NonZero", b.op("Equal", numbers, b.constant(number, np.int64)))
        rows, _ = b.ops("Split", places, axis=0, outputs=2)
        rows, pairs = b.op("Squeeze", rows, b.ints(0)), b.op("Transpose", places, perm=[1, 0])
        share = b.op("Unsqueeze", b.op("GatherND", shares, pairs), b.ints(1))
        made = b.op("Mul", expert(b, b.op("Gather", h, rows), name, number), share)
        before = b.op("Gather", total, rows)
        total = b.op("ScatterND", total, b.op("Unsqueeze", rows, b.ints(1)), b.op("Add", before, made))
    return total


def dense(b: Mixture, h: ir.Value, name: str) -> ir.Value:
    """Each expert runs on all tokens, and its results for those that did not choose it are dropped."""
    shares, numbers = chosen_by(b, h, name)
    parts = []
    for number in range(b.sizes.experts):
        chose = b.op("Equal", numbers, b.constant(number, np.int64))
        share = b.op("ReduceSum", b.op("Where", chose, shares, b.constant(0, np.float32)), b.ints(-1))
        parts.append(b.op("Mul", expert(b, h, name, number), share))
    return b.op("Sum", *parts)


def stacks(b: Mixture, name: str) -> tuple[ir.Value, ir.Value]:
    """The matrices of all experts."""
    experts, wide, inner = b.sizes.matrices
    return b.w(f"{name}.first", experts, wide, inner), b.w(f"{name}.second", experts, inner, wide)


def gathered(b: Mixture, h: ir.Value, name: str) -> ir.Value:
    """The chosen experts' matrices are gathered for each token."""
    shares, numbers = chosen_by(b, h, name)
    rows = b.op("Unsqueeze", b.op("Unsqueeze", h, b.ints(1)), b.ints(2))
    first, second = (b.op("Gather", stack, numbers) for stack in stacks(b, name))
    made = b.op("MatMul", b.op("Tanh", b.op("MatMul", rows, first)), second)
    weighed = b.op("Mul", b.op("Squeeze", made, b.ints(2)), b.op("Unsqueeze", shares, b.ints(-1)))
    return b.op("ReduceSum", weighed, b.ints(1), keepdims=0)


def stacked(b: Mixture, h: ir.Value, name: str) -> ir.Value:
    """All experts run on all tokens in one product with an axis of experts; the router's weights scale the results."""
    shares, numbers = chosen_by(b, h, name)
    zeros = b.op("Mul", scores_of(b, h, name), b.constant(0, np.float32))
    weights = b.op("ScatterElements", zeros, numbers, shares, axis=1)
    weights = b.op("Unsqueeze", b.op("Transpose", weights, perm=[1, 0]), b.ints(-1))
    first, second = stacks(b, name)
    inner = b.op("Tanh", b.op("MatMul", b.op("Unsqueeze", h, b.ints(0)), first))
    return b.op("ReduceSum", b.op("Mul", b.op("MatMul", inner, second), weights), b.ints(0), keepdims=0)


FORMS: dict[str, Callable[[Mixture, ir.Value, str], ir.Value]] = {
    "fused": fused,
    "quantized": quantized,
    "loop": loop,
    "dense": dense,
    "gathered": gathered,
    "stacked": stacked,
}
