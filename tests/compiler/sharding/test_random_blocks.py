"""Random blocks of the supported forms, split in random shares, agree with the whole."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx_ir as ir
import pytest

from tests.helpers.blocks import Block, check_rows, check_split
from tests.helpers.fuzz import seeds


class RandomBlock(Block):
    """A random transformer of one to three layers."""

    def __init__(self, seed: int) -> None:
        super().__init__(opset=20)
        self.chance = np.random.default_rng(seed)
        self.head = int(self.chance.choice([2, 4, 8]))
        self.kv_heads = int(self.chance.choice([1, 2, 3, 4]))
        self.group = int(self.chance.choice([1, 2, 3]))
        self.hidden = int(self.chance.choice([10, 14, 22]))
        self.split: set[str] = set()
        x = self.data("x", (2, 5, self.hidden), ["n", "t", self.hidden])
        for layer in range(int(self.chance.integers(1, 4))):
            x = self.layer(f"l{layer}", x)
        self.give(self.norm("last", x))

    def either(self, *options: str) -> str:
        return str(self.chance.choice(options))

    def layer(self, name: str, x: ir.Value) -> ir.Value:
        normed = self.norm(f"{name}.norm", x)
        form = self.either("in turn", "side by side", "joined")
        attended, heads = self.attention(name, normed)
        if form == "joined":  # attention's and the feed-forward part's last matrices in one
            width = int(self.chance.choice([16, 24, 40]))
            inner = self.op("Gelu", self.linear(f"{name}.up", normed, self.hidden, width))
            both = self.op("Concat", *self.either_order(attended, inner), axis=-1)
            return self.op(
                "Add", x, self.linear(f"{name}.out", both, heads * self.head + width, self.hidden, heads > 1)
            )
        attended = self.linear(f"{name}.o", attended, heads * self.head, self.hidden, heads > 1)
        if form == "side by side":
            return self.op("Add", self.op("Add", x, attended), self.feed_forward(name, normed))
        x = self.op("Add", x, attended)
        return self.op("Add", self.feed_forward(name, self.norm(f"{name}.norm2", x)), x)

    def either_order(self, *values: ir.Value) -> list[ir.Value]:
        return [values[int(place)] for place in self.chance.permutation(len(values))]

    def norm(self, name: str, x: ir.Value) -> ir.Value:
        form = self.either("layer", "rms by hand")
        if form == "layer":
            return self.op("LayerNormalization", x, self.w(f"{name}.w", self.hidden), self.w(f"{name}.b", self.hidden))
        square = self.op("ReduceMean", self.op("Mul", x, x), self.ints(-1))
        root = self.op("Sqrt", self.op("Add", square, self.constant(1e-5, np.float32)))
        return self.op("Mul", self.op("Div", x, root), self.w(f"{name}.w", self.hidden))

    def linear(self, name: str, x: ir.Value, rows: int, columns: int, must: bool = True) -> ir.Value:
        if must:
            self.split.add(name)
        form = self.either("matmul", "transposed", "gemm")
        if form == "transposed":
            y = self.op("MatMul", x, self.op("Transpose", self.w(name, columns, rows), perm=[1, 0]))
        elif form == "gemm":
            flat = self.op("Reshape", x, self.ints(-1, rows))
            y = self.op("Gemm", flat, self.w(name, columns, rows), self.w(f"{name}.c", columns), transB=1)
            y = self.op("Reshape", y, self.op("Concat", self.shape(x, 0), self.shape(x, 1), self.ints(columns), axis=0))
        else:
            y = self.op("MatMul", x, self.w(name, rows, columns))
        return self.op("Add", y, self.w(f"{name}.bias", columns)) if self.either("bias", "none") == "bias" else y

    def attention(self, name: str, x: ir.Value) -> tuple[ir.Value, int]:
        """The heads' output, and the number of heads."""
        heads, width = self.kv_heads * self.group, self.kv_heads * self.head
        many = self.kv_heads > 1
        if self.either("fused", "apart") == "fused":
            both = self.linear(f"{name}.qkv", x, self.hidden, heads * self.head + 2 * width, many)
            q, k, v = self.ops("Split", both, self.ints(heads * self.head, width, width), outputs=3, axis=-1)
        else:
            q = self.linear(f"{name}.q", x, self.hidden, heads * self.head, heads > 1)
            k, v = (self.linear(f"{name}.{part}", x, self.hidden, width, many) for part in "kv")
        q, k, v = (
            self.heads(q, heads),
            self.repeat(self.heads(k, self.kv_heads)),
            self.repeat(self.heads(v, self.kv_heads)),
        )
        scores = self.op("MatMul", q, self.op("Transpose", k, perm=[0, 1, 3, 2]))
        out = self.op("MatMul", self.op("Softmax", scores, axis=-1), v)
        joined = self.op("Reshape", self.op("Transpose", out, perm=[0, 2, 1, 3]), self.ints(0, 0, heads * self.head))
        return joined, heads

    def heads(self, x: ir.Value, count: int) -> ir.Value:
        return self.op("Transpose", self.op("Reshape", x, self.ints(0, 0, count, self.head)), perm=[0, 2, 1, 3])

    def repeat(self, x: ir.Value) -> ir.Value:
        if self.group == 1:
            return x
        heads = self.kv_heads * self.group
        wide = self.op("Expand", self.op("Unsqueeze", x, self.ints(2)), self.ints(1, 1, self.group, 1, 1))
        if self.either("constant", "computed") == "constant":
            return self.op("Reshape", wide, self.ints(0, heads, -1, self.head))
        own = self.op("Mul", self.shape(wide, 1), self.shape(wide, 2))
        return self.op("Reshape", wide, self.op("Concat", self.shape(x, 0), own, self.ints(-1, self.head), axis=0))

    def feed_forward(self, name: str, x: ir.Value) -> ir.Value:
        width = int(self.chance.choice([16, 24, 40]))
        form = self.either("plain", "gated", "gate and up in one", "experts")
        if form == "plain":
            inner = self.op(self.either("Relu", "Gelu", "Tanh"), self.linear(f"{name}.up", x, self.hidden, width))
        elif form == "gated":
            gate = self.linear(f"{name}.gate", x, self.hidden, width)
            inner = self.op("Mul", self.op("Sigmoid", gate), self.linear(f"{name}.up", x, self.hidden, width))
        elif form == "experts":
            return self.experts(name, x, width)
        else:
            first, second = self.ops(
                "Split", self.linear(f"{name}.both", x, self.hidden, 2 * width), outputs=2, axis=-1, num_outputs=2
            )
            inner = self.op("Mul", self.op("Sigmoid", first), second)
        return self.linear(f"{name}.down", inner, width, self.hidden)

    def experts(self, name: str, x: ir.Value, width: int) -> ir.Value:
        chances = self.op("Softmax", self.op("MatMul", x, self.w(f"{name}.router", self.hidden, 3)), axis=-1)
        total = None
        for number in range(3):
            inner = self.op("Relu", self.linear(f"{name}.{number}.up", x, self.hidden, width))
            outer = self.linear(f"{name}.{number}.down", inner, width, self.hidden)
            part = self.op(
                "Mul", outer, self.op("Slice", chances, self.ints(number), self.ints(number + 1), self.ints(2))
            )
            total = part if total is None else self.op("Add", total, part)
        assert total is not None
        return total


def random_shares(chance: np.random.Generator) -> list[float]:
    """Shares of two to five ranks: roughly even, or with a rank that gets no unit of some axis."""
    ranks = int(chance.integers(2, 6))
    spread = chance.choice([0.5, 2.0, 4.0])
    return [round(float(share), 4) for share in np.exp(chance.uniform(-spread, spread, ranks))]


@pytest.mark.fuzz
@pytest.mark.parametrize("seed", seeds(6, 16, first=22))  # these six have each form, and two to five ranks
def test_random_transformer(seed: int, tmp_path: Path) -> None:
    block = RandomBlock(seed)
    check_split(block, tmp_path, block.split, [random_shares(block.chance)], tolerance=1e-4)


@pytest.mark.fuzz
@pytest.mark.parametrize("seed", seeds(5, 8))
def test_random_transformer_by_row(seed: int, tmp_path: Path) -> None:
    block = RandomBlock(28 + seed)
    shares = [round(float(share), 2) for share in block.chance.uniform(0.5, 3, int(block.chance.integers(2, 5)))]
    check_rows(block, tmp_path, [], [shares], tolerance=1e-4)
