"""Recurrent networks in one operator: replicated on every rank, with their cost."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx_ir as ir
import pytest

from splitc.compiler.analysis.costs import node_flops
from tests.helpers.blocks import Block
from tests.helpers.operators import BATCH, INNER, PLACES, Middle, Tiny, check_operator, sandwich, stored, through

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


@pytest.mark.parametrize("kind", GATES)
def test_flops(kind: str) -> None:
    """Each step of each row is multiplied by the gates' input and recurrent weights."""
    gates = GATES[kind]
    values = [ir.Value(name=name) for name in "xwr"]
    node = ir.node(kind, values, {"hidden_size": 6})
    node.outputs[0].name = "y"
    shapes = {"x": (PLACES, BATCH, 4), "w": (1, gates * 6, 4), "r": (1, gates * 6, 6), "y": (PLACES, 1, BATCH, 6)}
    assert node_flops(node, shapes) == 2 * PLACES * BATCH * gates * 6 * (4 + 6)
