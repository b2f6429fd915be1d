"""Tables whose rows lie on several ranks, and are looked up in."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx_ir as ir
import pytest

from splitc.runtime import EngineError, Session
from tests.helpers.blocks import Block, check_split

ROWS, COLUMNS, MANY = 30, 12, 24


def test_tied_table_is_split_by_rows_and_its_lookup_summed(tmp_path: Path) -> None:
    b = Block()
    ids = b.indices("ids", [[0, 29, -1], [7, -30, 15]], ["n", "t"])
    table = b.w("table", ROWS, COLUMNS)
    hidden = b.op("Gather", table, ids, axis=0)
    b.give(b.op("MatMul", b.op("Tanh", hidden), b.op("Transpose", table, perm=[1, 0])), shape=["n", "t", ROWS])
    check_split(b, tmp_path, {"table"}, sums=1)
    with Session(tmp_path / "package") as session, pytest.raises(EngineError, match="out of data bounds"):
        session.run({"ids": np.array([[0, 30]])})


def test_tied_table_of_few_bits(tmp_path: Path) -> None:
    """As onnxruntime-genai writes it: packed for a product, and reshaped for lookups, with one scale for each block."""
    b = Block()
    ids = b.indices("ids", [[0, 29, -1], [7, -30, 15]], ["n", "t"])
    generator = np.random.default_rng(0)
    packed = b.weight("table", ir.tensor(generator.integers(0, 255, (ROWS, 2, 16), dtype=np.uint8)))
    scales = b.w("scales", ROWS, 2)
    rows = b.op("Reshape", packed, b.ints(ROWS, 32))
    how = {"bits": 4, "block_size": 32}
    hidden = b.op("com.microsoft.GatherBlockQuantized", rows, ids, scales, gather_axis=0, quantize_axis=1, **how)
    logits = b.op("com.microsoft.MatMulNBits", b.op("Tanh", hidden), packed, scales, K=64, N=ROWS, **how)
    b.give(logits, shape=["n", "t", ROWS])
    check_split(b, tmp_path, {"table", "scales"}, sums=1)


def test_large_table_that_is_computed_from_weights(tmp_path: Path) -> None:
    """Dequantized before it is looked up in; smaller ones are not worth a sum."""
    b = Block(opset=21)
    ids = b.indices("ids", [[0, 29, -1], [7, 1 << 16, 15]], ["n", "t"])
    numbers = np.random.default_rng(0).integers(-99, 99, (1 << 17, 512), dtype=np.int8)
    table = b.op("DequantizeLinear", b.weight("table", ir.tensor(numbers)), b.w("scales", 1 << 17), axis=0)
    inner = b.op("Relu", b.op("MatMul", b.op("Softmax", b.op("Gather", table, ids, axis=0)), b.w("A", 512, MANY)))
    b.give(b.op("Softmax", b.op("MatMul", inner, b.w("B", MANY, 512))), shape=["n", "t", 512])
    check_split(b, tmp_path, {"table", "scales", "A", "B"}, [(1, 2)], sums=2)


def test_table_that_is_looked_up_in_and_made_of_parts_is_whole(tmp_path: Path) -> None:
    """Rows of which some are multiplied with apart from the others, as tables of several codebooks are."""
    b = Block()
    ids = b.indices("ids", [[0, 29], [7, 15]], ["n", "t"])
    table = b.w("table", ROWS, COLUMNS)
    hidden = b.op("Tanh", b.op("Gather", table, ids, axis=0))
    logits = b.op("MatMul", hidden, b.op("Transpose", table, perm=[1, 0]))
    first, second = b.ops("Split", logits, b.ints(10, 20), outputs=2, axis=-1)
    b.give(b.op("Softmax", first), "first", ["n", "t", 10])
    b.give(b.op("Relu", second), "second", ["n", "t", 20])
    inner = b.op("Relu", b.op("MatMul", hidden, b.w("A", COLUMNS, MANY)))  # something that can be split
    b.give(b.op("Softmax", b.op("MatMul", inner, b.w("B", MANY, COLUMNS))), "third", ["n", "t", COLUMNS])
    check_split(b, tmp_path, {"A", "B"}, whole={"table"})
