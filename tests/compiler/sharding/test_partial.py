"""Partial values in halves are summed where that moves the fewest bytes, as behind a mixture of experts."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx_ir as ir
import pytest

from tests.helpers.blocks import FLOAT, Block, check_split, sharded
from tests.helpers.operators import softmax

HIDDEN, INNER, TOKENS = 12, 16, 2


def mixture(chosen: int, is_read_again: bool = False) -> Block:
    """Rows for the `chosen` experts of each token, in halves, which are weighted and added in single precision."""
    b = Block()
    x = softmax(b, b.data("x", (TOKENS * chosen, HIDDEN)))

    def half(name: str, *shape: int) -> ir.Value:
        return b.weight(name, ir.tensor(b.random(name, *shape).astype(np.float16)))

    inner = b.op("Relu", b.op("MatMul", b.op("Cast", x, to=ir.DataType.FLOAT16), half("A", HIDDEN, INNER)))
    rows = b.op("Cast", b.op("MatMul", inner, half("B", INNER, HIDDEN)), to=FLOAT)
    weighted = b.op("Mul", rows, b.op("ReduceMax", x, axes=[1], keepdims=1))
    by_token = b.op("Reshape", weighted, b.ints(TOKENS, chosen, HIDDEN))
    b.give(softmax(b, b.op("ReduceSum", by_token, b.ints(1), keepdims=0)))
    if is_read_again:
        b.give(softmax(b, weighted), "z")
    return b


@pytest.mark.parametrize(
    ("chosen", "is_read_again", "summed"),
    [(3, False, "ReduceSum"), (2, False, "ReduceSum"), (1, False, "MatMul"), (3, True, "MatMul")],
    ids=["fewer bytes", "as many bytes", "more bytes", "more readers"],
)
def test_sum_behind_a_cast_that_grows(tmp_path: Path, chosen: int, is_read_again: bool, summed: str) -> None:
    """It is passed unless more bytes are summed behind it."""
    for plan in check_split(mixture(chosen, is_read_again), tmp_path, "AB", tolerance=2e-3):
        (value,) = sharded(plan).sums.summed
        producer = value.producer()
        assert producer is not None and producer.op_type == summed


@pytest.mark.parametrize(("chosen", "summed"), [(3, "ReduceSum"), (1, "MatMul")])
def test_sum_behind_biases_that_are_looked_up(tmp_path: Path, chosen: int, summed: str) -> None:
    """One rank adds them, if fewer bytes are summed behind."""
    b = Block(opset=18)
    x = softmax(b, b.data("x", (TOKENS * chosen, HIDDEN)))
    made = b.op("MatMul", b.op("Relu", b.op("MatMul", x, b.w("A", HIDDEN, INNER))), b.w("B", INNER, HIDDEN))
    numbers = b.op("ArgMax", x, axis=-1, keepdims=0)
    rows = b.op("Add", made, b.op("Gather", b.w("biases", HIDDEN, HIDDEN), numbers))
    by_token = b.op("Reshape", rows, b.ints(TOKENS, chosen, HIDDEN))
    b.give(softmax(b, b.op("ReduceSum", by_token, b.ints(1), keepdims=0)))
    for plan in check_split(b, tmp_path, "AB"):
        (value,) = sharded(plan).sums.summed
        producer = value.producer()
        assert producer is not None and producer.op_type == summed
