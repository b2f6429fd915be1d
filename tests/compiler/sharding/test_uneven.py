"""Shares so uneven that a rank has no unit of some axis, or of any: outputs are the same."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx_ir as ir
import pytest

from splitc.runtime.package.manifest_file import read_manifest
from tests.helpers.blocks import FLOAT, Block, check_split

# Axes of 3 units and of 24, which one matrix multiplies together, and columns of the result.
FEW, MANY, SIZE, COLUMNS = 3, 24, 4, 12
UNEVEN = ((1, 16), (5, 1), (1, 12, 1), (30, 1, 1), (1, 1, 1, 1, 1))

Product = Callable[[Block, ir.Value], ir.Value]


def joined(b: Block) -> ir.Value:
    """[n, t, FEW x SIZE + MANY]: heads of a few units beside the output of an up projection."""
    x = b.op("Softmax", b.data("x", (2, 5, COLUMNS), ["n", "t", COLUMNS]))
    heads = b.op("Reshape", b.op("MatMul", x, b.w("A", COLUMNS, FEW * SIZE)), b.ints(0, 0, FEW, SIZE))
    flat = b.op("Reshape", b.op("Softmax", heads, axis=-1), b.ints(0, 0, FEW * SIZE))
    return b.op("Concat", flat, b.op("Relu", b.op("MatMul", x, b.w("B", COLUMNS, MANY))), axis=-1)


def plain(b: Block, v: ir.Value) -> ir.Value:
    return b.op("MatMul", v, b.w("C", FEW * SIZE + MANY, COLUMNS))


def with_bias(b: Block, v: ir.Value) -> ir.Value:
    flat = b.op("Reshape", v, b.ints(-1, FEW * SIZE + MANY))
    product = b.op("Gemm", flat, b.w("C", COLUMNS, FEW * SIZE + MANY), b.w("c", COLUMNS), transB=1)
    return b.op("Reshape", product, b.ints(2, -1, COLUMNS))


def integers(b: Block, v: ir.Value) -> ir.Value:
    return _integers(b, v, False)


def integers_to_float(b: Block, v: ir.Value) -> ir.Value:
    return _integers(b, v, True)


def _integers(b: Block, v: ir.Value, to_float: bool) -> ir.Value:
    """An integer product with a zero point, so that missing sections must not count as 0."""
    zero, scale = b.constant(7, np.uint8), b.constant(0.01, np.float32)
    data = b.op("QuantizeLinear", v, scale, zero)
    numbers = np.random.default_rng(0).integers(-100, 100, (FEW * SIZE + MANY, COLUMNS), dtype=np.int8)
    weight = b.weight("C", ir.tensor(numbers))
    if to_float:
        bias, none = b.w("c", COLUMNS), b.constant(0, np.int8)
        return b.op("com.microsoft.MatMulIntegerToFloat", data, weight, scale, scale, zero, none, bias)
    whole = b.op("Cast", b.op("MatMulInteger", data, weight, zero), to=FLOAT)
    return b.op("Mul", whole, b.constant(0.001, np.float32))


@pytest.mark.parametrize("product", [plain, with_bias, integers, integers_to_float])
def test_sections_that_a_rank_lacks_are_left_out_of_its_sum(product: Product, tmp_path: Path) -> None:
    """A rank with units of only one section adds only that one, and no copy of another rank's."""
    b = Block()
    b.give(b.op("Softmax", product(b, joined(b))))
    check_split(b, tmp_path, {"A", "B", "C"}, UNEVEN, sums=1)


def test_rank_without_any_part_is_there_and_does_nothing(tmp_path: Path) -> None:
    """Two columns, which nothing sums over, on three ranks."""
    b = Block()
    x = b.op("Softmax", b.data("x", (2, 5, 64), ["n", "t", 64]))
    b.give(b.op("MatMul", x, b.w("A", 64, 2)))
    (plan,) = check_split(b, tmp_path, {"A"}, [(1, 1, 1)], sums=0)
    manifest = read_manifest(tmp_path / "package")
    assert [len(rank.engines) for rank in manifest.ranks] == [1, 1, 0]
    assert any("rank 2 (cpu2) gets no part of any weight" in warning for warning in plan.warnings)


def test_axis_that_a_weight_has_twice_is_whole(tmp_path: Path) -> None:
    """In a residual stream without norms, the rows and columns of its matrices are one axis."""
    b = Block()
    x = b.data("x", (5, 12), ["n", 12])
    for number in range(3):
        x = b.op("Add", x, b.op("Relu", b.op("MatMul", x, b.w(f"W{number}", 12, 12))))
    inner = b.op("Relu", b.op("MatMul", b.op("Softmax", x), b.w("A", 12, MANY)))  # something that can be split
    b.give(b.op("MatMul", inner, b.w("B", MANY, 12)), shape=["n", 12])
    check_split(b, tmp_path, {"A", "B"}, UNEVEN, whole={"W0", "W1", "W2"})
