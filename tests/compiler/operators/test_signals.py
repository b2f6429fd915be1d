"""Operators along a signal's time leave other axes shardable."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx_ir as ir
import pytest

from tests.helpers.blocks import SHARES, Block
from tests.helpers.operators import INNER, PLACES, Middle, Tiny, check_operator, sandwich, through


def transformed(axis: int) -> Middle:
    """Real and imaginary parts of an axis, added."""

    def middle(b: Block, v: ir.Value) -> ir.Value:
        made = b.op("DFT", b.op("Unsqueeze", v, b.ints(3)), axis=axis)
        return b.op("ReduceSum", made, b.ints(3), keepdims=0)

    return middle


def windowed(b: Block, v: ir.Value) -> ir.Value:
    """Windows of one number along the inner axis."""
    signals = b.op("Reshape", v, b.ints(-1, INNER, 1))
    made = b.op("STFT", signals, b.constant(1, np.int64), b.constant([0.5], np.float32))
    return b.op("Reshape", b.op("ReduceSum", made, b.ints(3), keepdims=0), b.op("Shape", v))


def reversed_along(time: int, length: int) -> Middle:
    """A part of an axis, which comes after that of the rows, is reversed in each row."""
    order = [0, time, 3 - time]

    def middle(b: Block, v: ir.Value) -> ir.Value:
        lengths = b.op("Expand", b.ints(length), b.shape(v, 0))
        made = b.op("ReverseSequence", b.op("Transpose", v, perm=order), lengths, batch_axis=0, time_axis=1)
        return b.op("Transpose", made, perm=order)

    return middle


GRAPHS: dict[str, Tiny] = {
    "DFT": sandwich(transformed(1), needs=transformed(2), shares=SHARES),
    "STFT": sandwich(through("Relu"), needs=windowed),
    "ReverseSequence": sandwich(reversed_along(1, PLACES - 1), needs=reversed_along(2, INNER - 1), shares=SHARES),
}


@pytest.mark.parametrize("name", GRAPHS)
def test_operator_is_sharded(name: str, tmp_path: Path) -> None:
    check_operator(GRAPHS, name, tmp_path)


def test_axis_that_is_an_input(tmp_path: Path) -> None:
    """As it is from opset 20 on."""

    def middle(b: Block, v: ir.Value) -> ir.Value:
        made = b.op("DFT", b.op("Unsqueeze", v, b.ints(3)), None, b.constant(1, np.int64))
        return b.op("ReduceSum", made, b.ints(3), keepdims=0)

    sandwich(middle, opset=20).check(tmp_path)
