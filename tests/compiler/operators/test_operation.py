"""Partial values pass through operators that are linear in them, and are summed afterwards."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx_ir as ir
import pytest

from tests.helpers.blocks import FLOAT, Block, check_split, sharded
from tests.helpers.operators import BATCH, HIDDEN, INNER, PLACES, TWO, number, softmax, through


class Halves(Block):
    """A graph of products that sum over one sharded axis."""

    def __init__(self) -> None:
        super().__init__()
        x = softmax(self, self.data("x", (BATCH, PLACES, HIDDEN), ["n", "t", HIDDEN]))
        self.inner = self.op("Relu", self.op("MatMul", x, self.w("A", HIDDEN, INNER)))

    def partial(self, name: str) -> ir.Value:
        """A partial value, [n, t, hidden]."""
        return self.op("MatMul", self.inner, self.w(name, INNER, HIDDEN))


Middle = Callable[[Halves, ir.Value], ir.Value]


def where(b: Halves, v: ir.Value) -> ir.Value:
    """A Where of two partial values."""
    return b.op("Where", b.constant([[True], [False], [True], [True], [False]], np.bool_), v, b.partial("C"))


def scattered_elements(b: Halves, v: ir.Value) -> ir.Value:
    return b.op("ScatterND", v, b.constant([[0], [1]], np.int64), b.partial("C"))


# Operators that are linear in a partial value, or in all their partial inputs.
LINEAR: dict[str, Middle] = {
    "Add": lambda b, v: b.op("Add", v, b.partial("C")),
    "Sub": lambda b, v: b.op("Sub", b.partial("C"), v),
    "Sum": lambda b, v: b.op("Sum", v, b.partial("C"), b.partial("D")),
    "Mul": lambda b, v: b.op("Mul", b.w("factor", HIDDEN), v),
    "Div": lambda b, v: b.op("Div", v, number(b, 3)),
    "Neg": through("Neg"),
    "Where": where,
    "Reshape": lambda b, v: b.op("Reshape", v, b.ints(0, 0, 4, 3)),
    "Flatten": through("Flatten", axis=2),
    "Unsqueeze": lambda b, v: b.op("Unsqueeze", v, b.ints(1)),
    "Transpose": through("Transpose", perm=[1, 0, 2]),
    "Concat": lambda b, v: b.op("Concat", v, b.partial("C"), axis=-1),
    "Slice": lambda b, v: b.op("Slice", v, b.ints(1), b.ints(4), b.ints(1)),
    "Gather": lambda b, v: b.op("Gather", v, b.ints(4, 2), axis=1),
    "GatherElements": lambda b, v: b.op(
        "GatherElements", v, b.constant(np.zeros((BATCH, 1, HIDDEN)), np.int64), axis=1
    ),
    "GatherND": lambda b, v: b.op("GatherND", v, b.constant([[0, 1], [1, 4]], np.int64)),
    "ScatterND": scattered_elements,
    "ReduceSum": lambda b, v: b.op("ReduceSum", v, b.ints(1), keepdims=1),
    "ReduceMean": lambda b, v: b.op("ReduceMean", v, axes=[1]),
    "GlobalAveragePool": lambda b, v: b.op("GlobalAveragePool", b.op("Unsqueeze", v, b.ints(3))),
    "Einsum": through("Einsum", equation="nth->hnt"),
    "MatMul": lambda b, v: b.op("MatMul", v, b.w("W", HIDDEN, HIDDEN)),
}
OTHERS: dict[str, Middle] = {
    "Relu": through("Relu"),
    "Max": lambda b, v: b.op("Max", v, b.partial("C")),
    "Cast to whole numbers": lambda b, v: b.op("Cast", b.op("Cast", v, to=ir.DataType.INT32), to=FLOAT),
    "divisor": lambda b, v: b.op("Div", number(b, 3), v),
    "square": lambda b, v: b.op("Mul", v, v),
    "product of two": lambda b, v: b.op("Mul", v, b.partial("C")),
    "condition": lambda b, v: b.op("Where", b.op("Greater", v, number(b, 0)), number(b, 1), number(b, 2)),
}


def summed_behind(middle: Middle, folder: Path) -> list[str]:
    """The operators whose results are summed."""
    b = Halves()
    b.give(softmax(b, middle(b, b.partial("B"))))
    weights = {name for name in ("B", "C", "D") if name in b._weights}
    summed = set()
    for plan in check_split(b, folder, weights | {"A"}, TWO):
        producers = [value.producer() for value in sharded(plan).sums.summed]
        summed.add(tuple(producer.op_type for producer in producers if producer is not None))
    (operators,) = summed
    return list(operators)


@pytest.mark.parametrize("name", LINEAR)
def test_partial_value_goes_through(name: str, tmp_path: Path) -> None:
    (operator,) = summed_behind(LINEAR[name], tmp_path)
    assert operator == name


def test_partial_integers_go_through_a_cast(tmp_path: Path) -> None:
    b = Halves()
    whole = b.op("QuantizeLinear", b.inner, number(b, 0.1), b.constant(0, np.uint8))
    weight = np.random.default_rng(0).integers(-9, 9, (INNER, HIDDEN), dtype=np.int8)
    product = b.op("MatMulInteger", whole, b.weight("B", ir.tensor(weight)))
    b.give(softmax(b, b.op("Cast", product, to=FLOAT)))
    for plan in check_split(b, tmp_path, {"A", "B"}, TWO):
        (value,) = sharded(plan).sums.summed
        producer = value.producer()
        assert producer is not None and producer.op_type == "Cast"


@pytest.mark.parametrize("name", OTHERS)
def test_partial_value_is_summed_before(name: str, tmp_path: Path) -> None:
    assert set(summed_behind(OTHERS[name], tmp_path)) == {"MatMul"}
