"""Elementwise operators relate all axes of their inputs and outputs."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx_ir as ir
import pytest

from tests.helpers.blocks import FLOAT, SHARES, Block, check_split, sharded
from tests.helpers.operators import (
    INNER,
    TWO,
    Middle,
    Tiny,
    as_float,
    chain,
    check_operator,
    number,
    of_integers,
    sandwich,
    spread,
    through,
)

OF_ONE = """
    Abs Acos Asin Asinh Atan Atanh Celu Cos Cosh Dropout Elu Erf Exp HardSigmoid HardSwish Identity LeakyRelu Mish Neg
    Relu Selu Sigmoid Sign Sin Sinh Softplus Softsign Tan Tanh com.microsoft.Gelu com.microsoft.QuickGelu
"""


def with_weight(kind: str) -> Middle:
    """The operator of the value and a weight with a number for each column."""
    return lambda b, v: b.op(kind, v, b.w("w", INNER))


def rounded(kind: str) -> Middle:
    return lambda b, v: b.op(kind, spread(b, v))


def whole_numbers(b: Block, v: ir.Value, to: ir.DataType = ir.DataType.INT32) -> ir.Value:
    return b.op("Cast", b.op("Abs", b.op("Mul", v, number(b, 50))), to=to)


def of_bits(kind: str, to: ir.DataType = ir.DataType.INT32, **attributes: object) -> Middle:
    """The operator of integers."""

    def middle(b: Block, v: ir.Value) -> ir.Value:
        numbers = whole_numbers(b, v, to)
        others = [] if kind == "BitwiseNot" else [b.constant(3, to.numpy())]
        return as_float(b, b.op(kind, numbers, *others, **attributes))

    return middle


def choose(b: Block, condition: ir.Value, v: ir.Value) -> ir.Value:
    return b.op("Where", condition, v, b.op("Mul", v, b.w("slope", INNER)))


def compared(kind: str) -> Middle:
    return lambda b, v: choose(b, b.op(kind, v, number(b, 0.01)), v)


def equal(b: Block, v: ir.Value) -> ir.Value:
    return choose(
        b, b.op("Equal", b.op("Mod", whole_numbers(b, v), b.constant(2, np.int32)), b.constant(0, np.int32)), v
    )


def both(kind: str) -> Middle:
    """The operator of two conditions."""

    def middle(b: Block, v: ir.Value) -> ir.Value:
        return choose(b, b.op(kind, b.op("Greater", v, number(b, 0)), b.op("Less", v, b.w("w", INNER))), v)

    return middle


def cast(b: Block, v: ir.Value) -> ir.Value:
    return b.op("Cast", b.op("Cast", v, to=ir.DataType.DOUBLE), to=FLOAT)


def cast_like(b: Block, v: ir.Value) -> ir.Value:
    return b.op("CastLike", b.op("CastLike", v, b.constant(0, np.float64)), v)


GRAPHS: dict[str, Tiny] = {
    **{name: sandwich(through(name), opset=20) for name in OF_ONE.split()},
    "Gelu": sandwich(through("Gelu"), opset=20, shares=SHARES),
    "com.microsoft.FastGelu": sandwich(through("com.microsoft.FastGelu"), shares=SHARES),
    "Swish": sandwich(through("Swish"), opset=24),
    "Acosh": sandwich(chain("Sigmoid", "Exp", "Acosh")),
    "Log": sandwich(chain("Exp", "Log")),
    "Sqrt": sandwich(chain("Exp", "Sqrt")),
    "Reciprocal": sandwich(chain("Exp", "Reciprocal")),
    "Ceil": sandwich(rounded("Ceil")),
    "Floor": sandwich(rounded("Floor")),
    "Round": sandwich(rounded("Round")),
    "Shrink": sandwich(through("Shrink", lambd=0.1, bias=0.05)),
    "ThresholdedRelu": sandwich(through("ThresholdedRelu", alpha=0.05)),
    "Clip": sandwich(lambda b, v: b.op("Clip", v, number(b, -0.1), number(b, 0.1)), shares=SHARES),
    "Pow": sandwich(lambda b, v: b.op("Pow", v, number(b, 2)), shares=SHARES),
    "BitShift": sandwich(of_bits("BitShift", ir.DataType.UINT32, direction="LEFT")),
    **{name: sandwich(of_bits(name), opset=18) for name in ("BitwiseAnd", "BitwiseNot", "BitwiseOr", "BitwiseXor")},
    "Mod": sandwich(of_bits("Mod")),
    "IsNaN": sandwich(lambda b, v: choose(b, b.op("IsNaN", b.op("Log", v)), v), split={"slope"}),
    "IsInf": sandwich(lambda b, v: choose(b, b.op("IsInf", b.op("Log", b.op("Relu", v))), v), split={"slope"}),
    "Equal": sandwich(equal, split={"slope"}),
    **{
        name: sandwich(compared(name), split={"slope"}, shares=SHARES if name == "Greater" else TWO)
        for name in ("Greater", "GreaterOrEqual", "Less", "LessOrEqual")
    },
    "Not": sandwich(lambda b, v: choose(b, b.op("Not", b.op("Greater", v, number(b, 0))), v), split={"slope"}),
    **{name: sandwich(both(name), split={"w", "slope"}) for name in ("And", "Or", "Xor")},
    **{
        name: sandwich(with_weight(name), split={"w"})
        for name in ("Max", "Mean", "Min", "Mul", "PRelu", "Sub", "Sum", "com.microsoft.BiasGelu")
    },
    "Add": sandwich(lambda b, v: b.op("Relu", b.op("Add", b.w("bias", INNER), v)), split={"bias"}, shares=SHARES),
    "Div": sandwich(lambda b, v: b.op("Div", v, b.op("Exp", b.w("w", INNER))), split={"w"}),
    "Cast": sandwich(cast, shares=SHARES),
    "CastLike": sandwich(cast_like),
    "Where": sandwich(
        lambda b, v: b.op("Where", b.op("Greater", v, b.w("least", INNER)), v, b.w("other", INNER)),
        split={"least", "other"},
    ),
}


@pytest.mark.parametrize("name", [name for name in GRAPHS if name not in OF_ONE.split()])
def test_operator_is_sharded(name: str, tmp_path: Path) -> None:
    check_operator(GRAPHS, name, tmp_path)


@pytest.mark.parametrize("first", range(4))
def test_operators_of_one_value_are_sharded(first: int, tmp_path: Path) -> None:
    """Eight of them in one graph, which adds their results. A weight that stays whole has the reason: a node's name."""
    kinds = OF_ONE.split()[first::4]
    sandwich(lambda b, v: b.op("Sum", *(b.op(kind, v) for kind in kinds)), opset=20).check(tmp_path)


def test_bias_of_a_sum_is_added_once(tmp_path: Path) -> None:
    b = Block()
    x = b.op("Softmax", b.data("x", (2, 5, 12), ["n", "t", 12]))
    product = b.op("MatMul", b.op("Relu", b.op("MatMul", x, b.w("A", 12, INNER))), b.w("B", INNER, 12))
    b.give(b.op("Add", x, b.op("Sub", b.w("bias", 12), product)))
    check_split(b, tmp_path, {"A", "B"}, whole={"bias"}, sums=1)


def test_a_bias_that_adds_an_axis_is_added_to_the_sum(tmp_path: Path) -> None:
    """As in scikit-learn's means. A rank that left the bias out would lack the axis."""
    b = Block()
    product = b.op(
        "MatMul", b.op("MatMul", b.data("x", (2, 5, 12), ["n", "t", 12]), b.w("A", 12, 24)), b.w("B", 24, 12)
    )
    b.give(b.op("Add", product, b.w("bias", 1, 1, 1, 1)), shape=[1, "n", "t", 12])
    (plan,) = check_split(b, tmp_path, "AB", ((3, 1),), sums=1)
    assert plan.warnings == ()


def test_halves_are_summed_whether_a_rank_adds_the_bias_or_not(tmp_path: Path) -> None:
    """On the CPU, ONNX Runtime adds a bias in half precision; without one the product is in single precision."""
    b = Block(opset=20)

    def half(name: str, *shape: int) -> ir.Value:
        return b.weight(name, ir.tensor(b.random(name, *shape).astype(np.float16)))

    x = b.op("Cast", b.data("x", (2, 4, 16)), to=ir.DataType.FLOAT16)
    h = b.op("Gelu", b.op("MatMul", x, half("A", 16, 32)))
    y = b.op("Add", b.op("MatMul", h, half("B", 32, 16)), half("bias", 16))
    b.give(b.op("Cast", b.op("Tanh", b.op("Mul", y, y)), to=FLOAT))
    check_split(b, tmp_path, {"A", "B"}, sums=1, tolerance=2e-3)


def test_partial_integers_are_divided_after_they_are_summed(tmp_path: Path) -> None:
    b = Block()
    check_split(of_integers(b, lambda v: b.op("Div", v, b.constant(1000, np.int32))), tmp_path, "AB", TWO, sums=1)


@pytest.mark.parametrize("name", ["BFLOAT16", "FLOAT16", "FLOAT8E4M3FN"])
def test_partial_values_are_rounded_after_they_are_summed(name: str, tmp_path: Path) -> None:
    b = Block(opset=19)
    x = b.op("Softmax", b.data("x", (2, 5, 12)))
    y = b.op("MatMul", b.op("Relu", b.op("MatMul", x, b.w("A", 12, INNER))), b.w("B", INNER, 12))
    b.give(b.op("Cast", b.op("Cast", y, to=ir.DataType[name]), to=FLOAT))
    (plan,) = check_split(b, tmp_path, "AB", [(1, 1)], tolerance=2e-2)
    assert [value.dtype for value in sharded(plan).sums.summed] == [FLOAT]


@pytest.mark.parametrize("kind", ["Add", "Sub", "Sum"])
def test_partial_values_meet_before_they_are_summed(kind: str, tmp_path: Path) -> None:
    """As in blocks with parallel attention and feed-forward: one sum is enough for both and the residual."""
    b = Block()
    x = b.data("x", (2, 5, 12), ["n", "t", 12])
    both = [
        b.op("MatMul", b.op("Relu", b.op("MatMul", x, b.w(f"A{i}", 12, INNER))), b.w(f"B{i}", INNER, 12))
        for i in (0, 1)
    ]
    b.give(b.op(kind, b.op(kind, x, both[0]), both[1]))
    check_split(b, tmp_path, {"A0", "B0", "A1", "B1"}, sums=1)
