"""Recurrent networks in one operator: whole on every rank, or a direction on each, and their cost."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import onnx_ir as ir
import pytest

from splitc.compiler.analysis.costs import node_flops
from tests.helpers.blocks import Block, check_split
from tests.helpers.operators import (
    BATCH,
    HIDDEN,
    INNER,
    PLACES,
    TWO,
    Middle,
    Tiny,
    check_operator,
    sandwich,
    softmax,
    stored,
    through,
)

GATES = {"GRU": 3, "LSTM": 4, "RNN": 1}


def recurrent(kind: str) -> Middle:
    """Over the places, with as many hidden units as columns."""

    def middle(b: Block, v: ir.Value) -> ir.Value:
        rows = GATES[kind] * INNER
        weights = b.w("W", 1, rows, INNER), b.w("R", 1, rows, INNER)
        made = b.op(kind, b.op("Transpose", v, perm=[1, 0, 2]), *weights, hidden_size=INNER)
        return b.op("Transpose", b.op("Squeeze", made, b.ints(1)), perm=[1, 0, 2])

    return middle


def quantized(b: Block, v: ir.Value) -> ir.Value:
    """As LSTM, with weights of 8 bits, stored by columns."""
    weights = (stored(b, name, 1, INNER, GATES["LSTM"] * INNER) for name in ("W", "R"))
    scale, zero = b.constant([0.01], np.float32), b.constant([0], np.int8)
    made = b.op(
        "com.microsoft.DynamicQuantizeLSTM",
        *(b.op("Transpose", v, perm=[1, 0, 2]), *weights, None, None, None, None, None, scale, zero, scale, zero),
        hidden_size=INNER,
    )
    return b.op("Transpose", b.op("Squeeze", made, b.ints(1)), perm=[1, 0, 2])


GRAPHS: dict[str, Tiny] = {
    **{kind: sandwich(through("Relu"), needs=recurrent(kind)) for kind in ("GRU", "LSTM")},
    # Their own weights are small, so that the products beside them count, and are sharded by joining the inner axis.
    "RNN": sandwich(through("Relu"), needs=recurrent("RNN"), split="CD", whole="WR", sums=None),
    "com.microsoft.DynamicQuantizeLSTM": sandwich(through("Relu"), needs=quantized, split="CD", whole="WR", sums=None),
}


@pytest.mark.parametrize("name", GRAPHS)
def test_operator_is_sharded(name: str, tmp_path: Path) -> None:
    check_operator(GRAPHS, name, tmp_path)


# The activations of each direction.
ACTIVATIONS = {
    "GRU": ["Sigmoid", "Tanh", "HardSigmoid", "Softsign"],
    "LSTM": ["Sigmoid", "Tanh", "Tanh", "HardSigmoid", "Softsign", "Relu"],
    "RNN": ["Tanh", "Softsign"],
}


def two_directions(kind: str, is_joined: bool = False, **attributes: Sequence[float]) -> Callable[[], Block]:
    """A network of two directions between embeddings and a product, with initial states and lengths.

    `is_joined`: each direction has weights of its own, whose rows are moved, as torch's newer exporter writes them.
    """

    def build() -> Block:
        b, rows, own = Block(17), GATES[kind] * INNER, BATCH * [PLACES - 1]
        data = b.op("Transpose", softmax(b, b.data("x", (BATCH, PLACES, HIDDEN), ["n", "t", HIDDEN])), perm=[1, 0, 2])
        states = [b.w(f"first{n}", 2, BATCH, INNER) for n in range(2 if kind == "LSTM" else 1)]
        weights = b.w("W", 2, rows, HIDDEN), b.w("R", 2, rows, INNER), b.w("B", 2, 2 * rows)
        if is_joined:
            weights = (_joined(b, "V", rows, HIDDEN), _joined(b, "Q", rows, INNER), weights[2])
        made = b.op(
            kind,
            *(data, *weights, b.constant(own, np.int32), *states),
            *([b.w("P", 2, 3 * INNER)] if kind == "LSTM" else []),
            direction="bidirectional",
            hidden_size=INNER,
            activations=ACTIVATIONS[kind],
            **attributes,
        )
        joined = b.op("Reshape", b.op("Transpose", made, perm=[0, 2, 1, 3]), b.ints(0, 0, 2 * INNER))
        b.give(softmax(b, b.op("MatMul", joined, b.w("D", 2 * INNER, HIDDEN))))
        return b

    return build


@pytest.mark.parametrize("kind", GATES)
def test_each_rank_has_a_direction(kind: str, tmp_path: Path) -> None:
    """A third rank repeats one of them, and does not add to the sum."""
    split = {"W", "R", "B", "first0", "D", *({"P", "first1"} if kind == "LSTM" else ())}
    Tiny(two_directions(kind), split, sums=1, shares=((1, 1), (2, 1, 2))).check(tmp_path)


@pytest.mark.parametrize("kind", GATES)
def test_weights_of_each_direction_are_joined(kind: str, tmp_path: Path) -> None:
    """Each rank has those of its direction: in the graph, neither could be cut out of them."""
    for plan in check_split(two_directions(kind, is_joined=True)(), tmp_path, "D", ((1, 1),), sums=1):
        large = sum(weight.bytes for weight in plan.weights)
        assert sum(weight.whole for weight in plan.weights if weight.reason) < large / 10


def test_weights_of_directions_that_are_read_elsewhere_stay(tmp_path: Path) -> None:
    b = two_directions("RNN", is_joined=True)()
    b.give(b.op("Neg", b.w("V0", INNER, HIDDEN)), "z", shape=[INNER, HIDDEN])
    check_split(b, tmp_path, (), ((1, 1),), whole=("V0", "V1"))


def _joined(b: Block, name: str, rows: int, columns: int) -> ir.Value:
    """The weights of two directions, with the halves of their rows swapped."""
    parts = list[ir.Value]()
    for number in range(2):
        weight, bounds = b.w(f"{name}{number}", rows, columns), (b.ints(0), b.ints(rows // 2), b.ints(rows))
        halves = [b.op("Slice", weight, *ends, b.ints(0)) for ends in (bounds[1:], bounds[:2])]
        parts.append(b.op("Unsqueeze", b.op("Concat", *halves, axis=0), b.ints(0)))
    return b.op("Concat", *parts, axis=0)


def test_directions_with_numbers_for_their_activations_stay_together(tmp_path: Path) -> None:
    graph = two_directions("RNN", activation_alpha=[1.0, 1.0])
    check_split(graph(), tmp_path, (), TWO, {"W", "R", "B"})


@pytest.mark.parametrize("kind", GATES)
def test_flops(kind: str) -> None:
    """Each step of each row is multiplied by the gates' input and recurrent weights."""
    gates = GATES[kind]
    values = [ir.Value(name=name) for name in "xwr"]
    node = ir.node(kind, values, {"hidden_size": 6})
    node.outputs[0].name = "y"
    shapes = {"x": (PLACES, BATCH, 4), "w": (1, gates * 6, 4), "r": (1, gates * 6, 6), "y": (PLACES, 1, BATCH, 6)}
    assert node_flops(node, shapes) == 2 * PLACES * BATCH * gates * 6 * (4 + 6)
