"""QLinear operators, between a QuantizeLinear and a DequantizeLinear."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import pytest

from tests.helpers.blocks import SHARES, Block
from tests.helpers.operators import (
    HIDDEN,
    INNER,
    Middle,
    Tiny,
    as_image,
    by_heads,
    check_operator,
    number,
    sandwich,
    softmax,
    stored,
)

Triple = tuple[ir.Value, ir.Value, ir.Value]


def scaled(b: Block, scale: float = 0.05) -> tuple[ir.Value, ir.Value]:
    return number(b, scale), b.constant(128, np.uint8)


def quantized(b: Block, v: ir.Value) -> Triple:
    """The value in 8 bits, its scale and its zero point."""
    scale, zero = scaled(b)
    return b.op("QuantizeLinear", v, scale, zero), scale, zero


def constants(b: Block, name: str, *shape: int) -> Triple:
    return stored(b, name, *shape, kind=np.uint8), *scaled(b, 0.01)


def between(kind: str, *names: str, before: Sequence[ir.Value] = (), **how: Any) -> Middle:
    """The operator of the value and of weights with a number for each column."""

    def middle(b: Block, v: ir.Value) -> ir.Value:
        read = (*quantized(b, v), *(constant for name in names for constant in constants(b, name, INNER)))
        made = scaled(b)
        return b.op("DequantizeLinear", b.op(kind, *before, *read, *made, **how), *made)

    return middle


def joined(b: Block, v: ir.Value) -> ir.Value:
    """The concatenation of the value and its negative."""
    made, parts = scaled(b), (*quantized(b, v), *quantized(b, b.op("Neg", v)))
    return b.op("DequantizeLinear", b.op("com.microsoft.QLinearConcat", *made, *parts, axis=2), *made)


def chosen(b: Block, v: ir.Value) -> ir.Value:
    made, other = scaled(b), constants(b, "w", INNER)
    positive = b.op("Greater", v, number(b, 0))
    picked = b.op("com.microsoft.QLinearWhere", positive, *quantized(b, v), *other, *made)
    return b.op("DequantizeLinear", picked, *made)


def of_channels(middle: Middle) -> Middle:
    return lambda b, v: as_image(b, v, middle)


def convolved(kind: str, dense: bool) -> Middle:
    """A convolution, depthwise or over all channels."""

    def middle(b: Block, image: ir.Value) -> ir.Value:
        name = "Q" if dense else "G"
        filters = stored(b, name, INNER, INNER if dense else 1, 1 if dense else 3)
        scales = b.weight(f"{name}.scales", ir.tensor(np.linspace(0.001, 0.002, INNER, dtype=np.float32)))
        bias = b.weight(f"{name}.bias", ir.tensor(np.arange(INNER, dtype=np.int32)))
        made = scaled(b)
        how = {} if dense else {"group": INNER, "pads": [1, 1]}
        result = b.op(kind, *quantized(b, image), filters, scales, b.constant(0, np.int8), *made, bias, **how)
        return b.op("DequantizeLinear", result, *made)

    return of_channels(middle)


def pooled(kind: str, **how: Any) -> Middle:
    def middle(b: Block, image: ir.Value) -> ir.Value:
        made = scaled(b)
        pooled = b.op("DequantizeLinear", b.op(kind, *quantized(b, image), *made, **how), *made)
        return b.op("Add", image, pooled)

    return of_channels(middle)


def normalized(axis: int, opset: int = 13) -> Middle:
    return between("com.microsoft.QLinearSoftmax", axis=axis, opset=opset)


def product(name: str, rows: int, columns: int) -> Middle:
    """QLinearMatMul, with a scale for each column of the weight."""

    def middle(b: Block, v: ir.Value) -> ir.Value:
        scales = b.op("Exp", b.w(f"{name}.scales", columns))
        weight, made = (stored(b, name, rows, columns), scales, stored(b, f"{name}.zeros", columns)), scaled(b, 2)
        return b.op("DequantizeLinear", b.op("QLinearMatMul", *quantized(b, v), *weight, *made), *made)

    return middle


def products() -> Block:
    """The first is column-parallel. The second needs its rows whole, as its result is rounded, but not its columns."""
    b = Block()
    x = softmax(b, b.data("x", (2, 5, HIDDEN), ["n", "t", HIDDEN]))
    x = product("A", HIDDEN, INNER)(b, x)
    x = softmax(b, b.op("MatMul", b.op("Relu", x), b.w("B", INNER, HIDDEN)))
    x = product("C", INNER, HIDDEN)(b, b.op("Relu", b.op("MatMul", x, b.w("D", HIDDEN, INNER))))
    b.give(softmax(b, x))
    return b


def gemms() -> Block:
    """Float results may be partial sums: A is column-parallel, B row-parallel. Results of D are rounded."""
    b = Block()

    def gemm(v: ir.Value, name: str, rows: int, columns: int, *made: ir.Value) -> ir.Value:
        bias = b.weight(f"{name}.bias", ir.tensor(np.arange(columns, dtype=np.int32) * 100))
        scales = b.op("Mul", b.op("Exp", b.w(f"{name}.scales", columns)), number(b, 0.01))
        weight = stored(b, name, columns, rows), scales, b.constant([0] * columns, np.int8)
        return b.op("com.microsoft.QGemm", *quantized(b, v), *weight, bias, *made, transB=1)

    x = softmax(b, b.data("x", (5, HIDDEN), ["n", HIDDEN]))
    x = softmax(b, gemm(b.op("Relu", gemm(x, "A", HIDDEN, INNER)), "B", INNER, HIDDEN))
    made = scaled(b, 2)
    x = gemm(b.op("Relu", gemm(x, "C", HIDDEN, INNER)), "D", INNER, HIDDEN, *made)
    b.give(softmax(b, b.op("DequantizeLinear", x, *made)), shape=["n", HIDDEN])
    return b


GRAPHS: dict[str, Tiny] = {
    "QLinearConv": sandwich(
        convolved("QLinearConv", False),
        needs=convolved("QLinearConv", True),
        whole="C",
        split={"G", "G.scales", "G.bias", "Q", "Q.scales", "Q.bias", "D"},
        sums=2,
        shares=SHARES,
    ),
    "com.microsoft.QLinearConv": sandwich(
        convolved("com.microsoft.QLinearConv", False), split={"G", "G.scales", "G.bias"}
    ),
    "QLinearMatMul": Tiny(products, {"A", "A.scales", "A.zeros", "B"}, {"C", "D"}),
    "com.microsoft.QGemm": Tiny(gemms, {"A", "A.scales", "A.bias", "B"}, {"B.bias", "C", "D"}, sums=1, shares=SHARES),
    "com.microsoft.QLinearAdd": sandwich(between("com.microsoft.QLinearAdd", "w"), split={"w"}, shares=SHARES),
    "com.microsoft.QLinearMul": sandwich(between("com.microsoft.QLinearMul", "w"), split={"w"}),
    "com.microsoft.QLinearWhere": sandwich(chosen, split={"w"}),
    "com.microsoft.QLinearSigmoid": sandwich(between("com.microsoft.QLinearSigmoid")),
    "com.microsoft.QLinearLeakyRelu": sandwich(between("com.microsoft.QLinearLeakyRelu", alpha=0.1)),
    "com.microsoft.QLinearSoftmax": sandwich(normalized(1), needs=normalized(2)),
    "com.microsoft.QLinearConcat": sandwich(joined, narrow=2 * INNER, shares=SHARES),
    "com.microsoft.QLinearAveragePool": sandwich(
        pooled("com.microsoft.QLinearAveragePool", kernel_shape=[3], pads=[1, 1]),
    ),
    "com.microsoft.QLinearGlobalAveragePool": sandwich(pooled("com.microsoft.QLinearGlobalAveragePool")),
}
FORMS: dict[str, Tiny] = {
    "softmax before opset 13": sandwich(lambda b, v: by_heads(b, v, normalized(3, 12)), needs=normalized(1, 12)),
}


@pytest.mark.parametrize("name", GRAPHS)
def test_operator_is_sharded(name: str, tmp_path: Path) -> None:
    check_operator(GRAPHS, name, tmp_path)


@pytest.mark.parametrize("form", FORMS)
def test_other_form_is_sharded(form: str, tmp_path: Path) -> None:
    FORMS[form].check(tmp_path)
