"""Operators that make values from sizes alone, and operators that draw random numbers."""

from __future__ import annotations

from itertools import product
from pathlib import Path

import numpy as np
import onnx_ir as ir
import pytest

from models.writer import save
from splitc.compiler import Request, compile_model, plan_model
from splitc.compiler.errors import CannotSplitError
from splitc.compiler.nodes import operator_name
from splitc.compiler.operators.generators import OPERATORS
from splitc.runtime import Session
from tests.conftest import assert_close, run_whole
from tests.helpers.blocks import FLOAT, Block
from tests.helpers.graphs import read_graph
from tests.helpers.operators import (
    BATCH,
    HIDDEN,
    INNER,
    PLACES,
    Middle,
    Tiny,
    as_float,
    check_operator,
    number,
    sandwich,
    softmax,
    through,
)


def numbered(b: Block, v: ir.Value) -> ir.Value:
    batch, size = (b.op("Gather", b.op("Shape", v), b.constant(number, np.int64), axis=0) for number in (0, 2))
    size = b.op("Sub", b.op("Add", size, batch), batch)  # which inference does not know as a number
    numbers = b.op("Range", b.constant(0, np.int64), size, b.constant(1, np.int64))
    return b.op("Mul", v, b.op("Cast", numbers, to=FLOAT))


def chosen(b: Block, v: ir.Value, **how: object) -> ir.Value:
    """Bernoulli's numbers, drawn by a probability for each element."""
    return as_float(b, b.op("Bernoulli", b.op("Sigmoid", v), **how))


def sampled(b: Block, v: ir.Value) -> ir.Value:
    """One drawn number for each row of [n, t, 12] probabilities."""
    flat = b.op("Reshape", v, b.ints(-1, HIDDEN))
    return b.op("Reshape", as_float(b, b.op("Multinomial", flat, sample_size=1)), b.ints(BATCH, PLACES, 1))


def dropped(b: Block, v: ir.Value) -> ir.Value:
    return b.op("Dropout", v, number(b, 0.5), b.constant(True, np.bool_))


def kept(b: Block, v: ir.Value) -> ir.Value:
    """A dropout's mask."""
    return as_float(b, b.ops("Dropout", v, number(b, 0.5), b.constant(True, np.bool_), outputs=2)[1])


def drawn_in_a_branch(b: Block, v: ir.Value) -> ir.Value:
    branches = []
    for kind in ("RandomNormal", "RandomUniform"):
        node = ir.node(kind, [], {"shape": [BATCH, PLACES, HIDDEN]})
        node.outputs[0].name, node.outputs[0].type = kind, ir.TensorType(FLOAT)
        branches.append(ir.Graph([], node.outputs, nodes=[node], name=kind))
    least = b.op("Greater", b.op("ReduceMax", v, keepdims=0), number(b, 2))
    return b.op("If", least, then_branch=branches[0], else_branch=branches[1])


DRAWN: dict[str, Middle] = {
    "Bernoulli": chosen,
    "Multinomial": sampled,
    "RandomNormal": lambda b, v: b.op("RandomNormal", shape=[1, PLACES, 1]),
    "RandomNormalLike": through("RandomNormalLike"),
    "RandomUniform": lambda b, v: b.op("RandomUniform", shape=[BATCH, PLACES, HIDDEN]),
    "RandomUniformLike": through("RandomUniformLike"),
}
FORMS: dict[str, Middle] = {
    "Bernoulli, of bools": lambda b, v: chosen(b, v, dtype=ir.DataType.BOOL),
    "Dropout": dropped,
    "Dropout, its mask": kept,
    "If": drawn_in_a_branch,
}
GRAPHS: dict[str, Tiny | Middle] = {**DRAWN, "Range": sandwich(through("Relu"), needs=numbered)}
RANDOM = [operator.name for operator in OPERATORS if operator.random]


def test_range_needs_its_size_whole(tmp_path: Path) -> None:
    check_operator({"Range": sandwich(through("Relu"), needs=numbered)}, "Range", tmp_path)


def with_noise(noise: Middle) -> Block:
    """h = x A B plus noise, which is also an output; then y = h C D. A norm before each pair needs the axis whole."""
    b = Block()
    h = b.data("x", (BATCH, PLACES, HIDDEN))
    for first, second in ("AB", "CD"):
        inner = b.op("Relu", b.op("MatMul", softmax(b, h), b.w(first, HIDDEN, INNER)))
        h = b.op("MatMul", inner, b.w(second, INNER, HIDDEN))
        if first == "A":
            drawn = noise(b, softmax(b, h))
            h = b.op("Add", h, drawn)
    b.give(b.op("Identity", drawn), "drawn")
    b.give(h, shape=[BATCH, PLACES, HIDDEN])
    return b


# All with ranks that have no unit, the first or the others, and one with even shares.
SHARED = [*product([*DRAWN, *FORMS], [(30, 1, 1), (1, 40)]), ("RandomNormal", (1, 1))]


@pytest.mark.parametrize(("name", "shares"), SHARED)
def test_ranks_compute_with_the_same_random_numbers(name: str, shares: tuple[float, ...], tmp_path: Path) -> None:
    """The unsplit model, fed the ranks' random numbers, gives the same outputs. Another run draws other numbers."""
    block = with_noise((DRAWN | FORMS)[name])
    save(block.model(), tmp_path / "model.onnx")
    request = Request(split_mode="tensor", tensor_split=shares, memory=["1GiB"])
    plan = plan_model(tmp_path / "model.onnx", [f"{len(shares)}xcpu"], request)
    assert {weight.name for weight in plan.weights if weight.split} == set("ABCD")
    compile_model(plan, tmp_path / "package", verify=False)
    with Session(tmp_path / "package", verify="never") as session:
        got, again = session.run(block.feeds), session.run(block.feeds)
    assert "Dropout" in name or (got["drawn"] != again["drawn"]).any()  # ONNX Runtime's drops nothing on a CPU
    told = with_noise(lambda b, v: b.input("numbers", FLOAT, got["drawn"].shape))
    save(told.model(), tmp_path / "told.onnx")
    assert_close(got, run_whole(tmp_path / "told.onnx", {**block.feeds, "numbers": got["drawn"]}))


def test_a_sequence_that_is_drawn_is_refused(tmp_path: Path) -> None:
    """Ranks can't send sequences to each other."""
    b = Block()
    node = ir.node("SequenceConstruct", [ir.node("RandomNormal", [], {"shape": [2, HIDDEN]}).outputs[0]])
    source = node.inputs[0].producer() if node.inputs[0] is not None else None
    assert source is not None
    source.outputs[0].name, node.outputs[0].name = "numbers", "list"
    node.outputs[0].type = ir.SequenceType(ir.TensorType(FLOAT))
    branch = ir.Graph([], node.outputs, nodes=[source, node], name="branch")
    x = b.data("x", (2, HIDDEN))
    drawn = b.op(
        "If",
        b.op("Greater", b.op("ReduceMax", x, keepdims=0), number(b, 0)),
        then_branch=branch,
        else_branch=branch.clone(),
    )
    b.give(b.op("SequenceAt", drawn, b.constant(0, np.int64)), "noise", [2, HIDDEN])
    inner = b.op("Relu", b.op("MatMul", x, b.w("A", HIDDEN, INNER)))
    b.give(b.op("MatMul", inner, b.w("B", INNER, HIDDEN)), shape=[2, HIDDEN])
    save(b.model(), tmp_path / "model.onnx")
    with pytest.raises(CannotSplitError, match="draws random numbers"):
        plan_model(tmp_path / "model.onnx", ["2xcpu"], Request(split_mode="tensor", memory=["1GiB"]))


@pytest.mark.parametrize("name", RANDOM)
def test_random_numbers_are_drawn_once(name: str, tmp_path: Path) -> None:
    """Numbers drawn from a weight alone, which both stages read: the second stage receives them from the first."""
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
