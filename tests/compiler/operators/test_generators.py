"""Operators that make values of nothing but sizes; random numbers."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx_ir as ir
import pytest

from models.writer import save
from splitc.compiler import Request, plan_model
from splitc.compiler.nodes import operator_name
from splitc.compiler.operators.generators import OPERATORS
from tests.helpers.blocks import FLOAT, Block
from tests.helpers.graphs import read_graph
from tests.helpers.operators import INNER, Middle, Tiny, check_operator, number, sandwich, through


def settled(b: Block, v: ir.Value) -> ir.Value:
    """A number that any random one becomes."""
    return b.op("Clip", v, number(b, 0.5), number(b, 0.5))


def beside(middle: Middle) -> Middle:
    """Random numbers, settled, that are added to the value."""
    return lambda b, v: b.op("Add", v, settled(b, middle(b, v)))


def drawn_rows(b: Block, v: ir.Value) -> ir.Value:
    """One sample a row of [2, 24] chances."""
    return b.op("Cast", b.op("Multinomial", b.op("ReduceSum", v, b.ints(1), keepdims=0), sample_size=1), to=FLOAT)


def numbered(b: Block, v: ir.Value) -> ir.Value:
    size = b.op("Gather", b.op("Shape", v), b.constant(2, np.int64), axis=0)
    numbers = b.op("Range", b.constant(0, np.int64), size, b.constant(1, np.int64))
    return b.op("Mul", v, b.op("Cast", numbers, to=FLOAT))


GRAPHS: dict[str, Tiny] = {
    "Bernoulli": sandwich(through("Relu"), needs=beside(lambda b, v: b.op("Bernoulli", b.op("Sigmoid", v)))),
    "Multinomial": sandwich(
        through("Relu"), needs=lambda b, v: b.op("Add", v, b.op("Unsqueeze", settled(b, drawn_rows(b, v)), b.ints(2)))
    ),
    "RandomNormal": sandwich(beside(lambda b, v: b.op("RandomNormal", shape=[1, 5, 1]))),
    "RandomNormalLike": sandwich(through("Relu"), needs=beside(through("RandomNormalLike"))),
    "RandomUniform": sandwich(beside(lambda b, v: b.op("RandomUniform", shape=[1, 5, 1]))),
    "RandomUniformLike": sandwich(through("Relu"), needs=beside(through("RandomUniformLike"))),
    "Range": sandwich(through("Relu"), needs=numbered),
}
RANDOM = [operator.name for operator in OPERATORS if operator.random]


@pytest.mark.parametrize("name", GRAPHS)
def test_operator(name: str, tmp_path: Path) -> None:
    check_operator(GRAPHS, name, tmp_path)


@pytest.mark.parametrize("name", RANDOM)
def test_random_numbers_are_drawn_once(name: str, tmp_path: Path) -> None:
    """Of a weight alone, and read by both stages: the second one gets them from the first."""
    b = Block()
    x = b.data("x", (2, INNER), [2, INNER])
    own = {"shape": [2, INNER]} if name in ("RandomNormal", "RandomUniform") else {}
    drawn = b.op(name, *([] if own else [b.w("chances", 2, INNER)]), **own)
    drawn = drawn if name != "Multinomial" else b.op("Cast", drawn, to=FLOAT)
    other = b.op("Neg", b.w("chances", 2, INNER))  # what is no random number is computed in both
    for layer in range(4):
        x = b.op("Add", b.op("Mul", b.op("MatMul", x, b.w(f"A{layer}", INNER, INNER)), drawn), other)
    b.give(x, shape=[2, INNER])
    save(b.model(), tmp_path / "model.onnx")
    plan = plan_model(tmp_path / "model.onnx", ["2xcpu"], Request(split_mode="layer", tensor_split=[1, 1]))
    stages = [{operator_name(node) for node in rank.stage.nodes} for rank in plan.ranks]
    assert [name in stage for stage in stages] == [True, False]
    assert ["Neg" in stage for stage in stages] == [True, True]
    constant = {node.op_type for node in read_graph(tmp_path / "model.onnx").constant}
    assert constant == {"Neg"}
