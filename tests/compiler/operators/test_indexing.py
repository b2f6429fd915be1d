"""Operators that pick and write by index; lookups in tables whose rows are sharded."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx_ir as ir
import pytest

from splitc.runtime import EngineError, Session
from tests.helpers.blocks import SHARES, Block, check_split
from tests.helpers.operators import INNER, Middle, Tiny, as_float, check_operator, sandwich, stored, through

ROWS, COLUMNS, MANY = 30, 12, 24


def picked_rows(b: Block, v: ir.Value) -> ir.Value:
    return b.op("Gather", v, b.ints(4, 1, 0), axis=1)


def picked_columns(b: Block, v: ir.Value) -> ir.Value:
    return b.op("Gather", v, b.ints(*reversed(range(INNER))), axis=-1)


def largest_first(axis: int) -> Middle:
    """Sorted along an axis, by indices."""

    def middle(b: Block, v: ir.Value) -> ir.Value:
        order = b.ops("TopK", v, b.ints(INNER if axis == -1 else 5), outputs=2, axis=axis)[1]
        return b.op("GatherElements", v, order, axis=axis)

    return middle


def picked_by_element(b: Block, v: ir.Value) -> ir.Value:
    return b.op("GatherND", v, b.constant([[0], [1], [1]], np.int64))


def picked_one_by_one(b: Block, v: ir.Value) -> ir.Value:
    rows = [[[n, t, i] for i in reversed(range(INNER))] for n in (0, 1) for t in (0, 1)]
    return b.op("GatherND", v, b.constant(rows, np.int64))


def scattered_rows(b: Block, v: ir.Value) -> ir.Value:
    zeros = b.op("ConstantOfShape", b.op("Shape", v), value=ir.tensor([0.0]))
    updates = b.op("Gather", v, b.ints(1, 0), axis=0)
    return b.op("ScatterND", zeros, b.constant([[0], [1]], np.int64), updates)


def scattered_one_by_one(b: Block, v: ir.Value) -> ir.Value:
    return b.op("ScatterND", v, b.constant([[0, 0, 3], [1, 2, 20]], np.int64), b.constant([1, 2], np.float32))


def expanded_spots(b: Block, v: ir.Value) -> ir.Value:
    """Both rows, expanded to a shape that inference can't tell, as PyTorch's exporter writes indices."""
    sizes = b.op(
        "Concat", b.shape(v, 0), b.op("Cast", b.op("Sqrt", b.constant([1.0], np.float32)), to=ir.DataType.INT64), axis=0
    )
    return b.op("Expand", b.constant([[0], [1]], np.int64), sizes)


def picked_where_shapes_are_unknown(b: Block, v: ir.Value) -> ir.Value:
    return b.op("GatherND", v, expanded_spots(b, v))


def scattered_where_shapes_are_unknown(b: Block, v: ir.Value) -> ir.Value:
    return b.op("ScatterND", b.op("Neg", v), expanded_spots(b, v), v)


def scattered_by_element(b: Block, v: ir.Value) -> ir.Value:
    spots = b.op("Expand", b.constant([[[2]]], np.int64), b.op("Concat", b.shape(v, 0), b.ints(1, INNER), axis=0))
    first = b.op("Slice", v, b.ints(0), b.ints(1), b.ints(1))
    return b.op("ScatterElements", v, spots, first, axis=1)


def scattered_in_one(b: Block, v: ir.Value) -> ir.Value:
    """Written along an axis of size 1, at an index that depends on sizes."""
    one = b.op("Unsqueeze", v, b.ints(1))
    spots = b.op("Sub", b.op("Shape", one, end=1), b.op("Shape", v, end=1))
    return b.op(
        "ReduceMax",
        b.op("ScatterElements", one, b.op("Expand", spots, b.op("Shape", one)), b.op("Neg", one), axis=1),
        axes=[1],
        keepdims=0,
    )


def scattered_along(b: Block, v: ir.Value) -> ir.Value:
    return b.op("ScatterElements", v, b.constant([[[2]]], np.int64), b.constant([[[1]]], np.float32), axis=-1)


def scattered_in_part(b: Block, v: ir.Value) -> ir.Value:
    """One element of one column, so that rows are not written whole."""
    return b.op("ScatterElements", v, b.constant([[[2]]], np.int64), b.constant([[[1]]], np.float32), axis=1)


def written_to_a_cache(b: Block, v: ir.Value) -> ir.Value:
    """One place for each row. The axis is the default, the last but one."""
    news = b.op("MatMul", b.data("new", (2, 1, 4)), b.w("W", 4, INNER))
    return b.op("TensorScatter", v, news, b.ints(2, 1))


def written_along(b: Block, v: ir.Value) -> ir.Value:
    return b.op("TensorScatter", v, b.op("Slice", v, b.ints(0), b.ints(1), b.ints(2)), b.ints(2, 20), axis=2)


def tied_table_of_few_bits() -> Block:
    """As onnxruntime-genai writes it: packed for the product, reshaped for lookups, with a scale for each block."""
    b = Block()
    ids = b.indices("ids", [[0, 29, -1], [7, -30, 15]], ["n", "t"])
    packed = stored(b, "table", ROWS, 2, 16, kind=np.uint8)
    scales = b.w("scales", ROWS, 2)
    rows = b.op("Reshape", packed, b.ints(ROWS, 32))
    how = {"bits": 4, "block_size": 32}
    hidden = b.op("com.microsoft.GatherBlockQuantized", rows, ids, scales, gather_axis=0, quantize_axis=1, **how)
    logits = b.op("com.microsoft.MatMulNBits", b.op("Tanh", hidden), packed, scales, K=64, N=ROWS, **how)
    b.give(logits, shape=["n", "t", ROWS])
    return b


def among_unlike(b: Block, v: ir.Value) -> ir.Value:
    """Divided by the number of unique elements, and by that of unique columns."""
    counts = [b.op("Size", b.op("Unique", v)), b.op("Size", b.op("Unique", v, axis=-1))]
    return b.op("Div", b.op("Div", v, as_float(b, counts[0])), as_float(b, counts[1]))


def over_its_positives(b: Block, v: ir.Value) -> ir.Value:
    """Divided by one more than the number of positive elements."""
    positive = b.op("NonZero", b.op("Greater", v, b.constant(0.0, np.float32)))
    return b.op("Div", v, as_float(b, b.op("Add", b.op("Size", positive), b.constant(1, np.int64))))


def marked(b: Block, v: ir.Value) -> ir.Value:
    """With 2 added to the largest element of each row."""
    highest = b.op("ArgMax", v, axis=-1, keepdims=0)
    return b.op("Add", v, b.op("OneHot", highest, b.ints(INNER), b.constant([0, 2], np.float32)))


def lower_by_heads(b: Block, v: ir.Value) -> ir.Value:
    """The lower triangle of each head's places and elements."""
    heads = b.op("Transpose", b.op("Reshape", v, b.ints(0, 0, 8, 3)), perm=[0, 2, 1, 3])
    lower = b.op("Transpose", b.op("Trilu", heads, upper=0), perm=[0, 2, 1, 3])
    return b.op("Reshape", lower, b.ints(0, 0, INNER))


GRAPHS: dict[str, Tiny] = {
    "NonZero": sandwich(through("Identity"), needs=over_its_positives),
    "OneHot": sandwich(through("Identity"), needs=marked),
    "Unique": sandwich(through("Identity"), needs=among_unlike),
    "Gather": sandwich(picked_rows, needs=picked_columns, whole="C", split="D", sums=2, shares=SHARES),
    "GatherElements": sandwich(largest_first(1), needs=largest_first(-1)),
    "GatherND": sandwich(picked_by_element, needs=picked_one_by_one, whole="C", split="D", sums=2, shares=SHARES),
    "com.microsoft.GatherBlockQuantized": Tiny(tied_table_of_few_bits, {"table", "scales"}, sums=1, shares=SHARES),
    "ScatterND": sandwich(scattered_rows, needs=scattered_one_by_one, shares=SHARES),
    "ScatterElements": sandwich(scattered_by_element, needs=scattered_along, shares=SHARES),
    "TensorScatter": sandwich(written_to_a_cache, needs=written_along, split="W", opset=24),
    "Trilu": sandwich(lower_by_heads, needs=through("Trilu", upper=0)),
}
FORMS = {
    "picked at unknown shapes": sandwich(picked_where_shapes_are_unknown, shares=SHARES),
    "scattered at unknown shapes": sandwich(scattered_where_shapes_are_unknown, shares=SHARES),
    "scattered in part": sandwich(scattered_by_element, needs=scattered_in_part),
    "scattered along one": sandwich(scattered_in_one, opset=15, shares=SHARES),
}


@pytest.mark.parametrize("name", GRAPHS)
def test_operator_is_sharded(name: str, tmp_path: Path) -> None:
    check_operator(GRAPHS, name, tmp_path)


@pytest.mark.parametrize("form", FORMS)
def test_other_form_is_sharded(form: str, tmp_path: Path) -> None:
    FORMS[form].check(tmp_path)


@pytest.mark.parametrize("opset", [9, 11, 12, 17])
def test_tied_table_is_split_by_rows_and_its_lookup_summed(opset: int, tmp_path: Path) -> None:
    b = Block(opset)
    ids = b.indices("ids", [[0, 29, -1], [7, -30, 15]], ["n", "t"])
    table = b.w("table", ROWS, COLUMNS)
    hidden = b.op("Gather", table, ids, axis=0)
    b.give(b.op("MatMul", b.op("Tanh", hidden), b.op("Transpose", table, perm=[1, 0])), shape=["n", "t", ROWS])
    check_split(b, tmp_path, {"table"}, sums=1)
    with Session(tmp_path / "package") as session, pytest.raises(EngineError, match="out of data bounds"):
        session.run({"ids": np.array([[0, 30]])})


def six_rows(b: Block) -> ir.Value:
    """Six rows of four that are made of normalized values."""
    x = b.op("Softmax", b.data("x", (4, COLUMNS)))
    return b.op("Reshape", b.op("MatMul", x, b.w("A", COLUMNS, MANY)), b.ints(0, 6, 4))


@pytest.mark.parametrize(("key", "value"), [(-2, -1), (4, 5), (4, -1)])
def test_rows_behind_others_are_sections(key: int, value: int, tmp_path: Path) -> None:
    """As Falcon's key and value, which all queries share. They are whole, and the queries' heads are split."""
    b = Block()
    rows = six_rows(b)
    queries = b.op("Softmax", b.op("Slice", rows, b.ints(0), b.ints(-2), b.ints(1)))
    one, other = (b.op("Gather", rows, b.ints(place), axis=1) for place in (key, value))
    heads = b.op("Mul", queries, b.op("Tanh", b.op("Mul", one, other)))
    out = b.op("MatMul", b.op("Reshape", heads, b.ints(0, 16)), b.w("B", 16, COLUMNS))
    b.give(b.op("Softmax", out), shape=[4, COLUMNS])
    for plan in check_split(b, tmp_path, {"B"}, sums=1):
        assert {weight.name: weight.split for weight in plan.weights}["A"] == COLUMNS * 16 * 4


def test_row_between_others_is_picked_behind_a_shard(tmp_path: Path) -> None:
    """Where it lies follows from a rank's share of the rows before it."""
    b = Block()
    rows = six_rows(b)
    before = b.op("Softmax", b.op("Slice", rows, b.ints(0), b.ints(3), b.ints(1)))
    behind = b.op("Softmax", b.op("Slice", rows, b.ints(4), b.ints(6), b.ints(1)))
    scaled = b.op("Mul", b.op("Concat", before, behind, axis=1), b.op("Gather", rows, b.ints(3), axis=1))
    out = b.op("MatMul", b.op("Reshape", scaled, b.ints(0, 20)), b.w("B", 20, COLUMNS))
    b.give(b.op("Softmax", out), shape=[4, COLUMNS])
    for plan in check_split(b, tmp_path, {"B"}, sums=1):
        assert {weight.name: weight.split for weight in plan.weights}["A"] == COLUMNS * 20 * 4


@pytest.mark.parametrize(("reduction", "sums"), [("none", 1), ("add", 1), ("max", 2), ("mul", 2)])
def test_partial_rows_that_are_scattered(reduction: str, sums: int, tmp_path: Path) -> None:
    """They are summed before any reduction other than an addition."""
    b = Block(opset=18)
    x = b.op("Softmax", b.data("x", (4, COLUMNS)))
    inner = b.op("Relu", b.op("MatMul", x, b.w("A", COLUMNS, MANY)))
    data, updates = (b.op("MatMul", inner, b.w(name, MANY, COLUMNS)) for name in "BC")
    order = b.constant([[3], [2], [1], [0]], np.int64)
    b.give(b.op("ScatterND", data, order, updates, reduction=reduction), shape=[4, COLUMNS])
    check_split(b, tmp_path, "ABC", [(1, 1)], sums=sums)


def test_large_table_that_is_computed_from_weights(tmp_path: Path) -> None:
    """The table is dequantized before the lookup. Smaller tables are not worth a sum."""
    b = Block(opset=21)
    ids = b.indices("ids", [[0, 29, -1], [7, 1 << 16, 15]], ["n", "t"])
    numbers = np.random.default_rng(0).integers(-99, 99, (1 << 17, 256), dtype=np.int8)
    table = b.op("DequantizeLinear", b.weight("table", ir.tensor(numbers)), b.w("scales", 1 << 17), axis=0)
    inner = b.op("Relu", b.op("MatMul", b.op("Softmax", b.op("Gather", table, ids, axis=0)), b.w("A", 256, MANY)))
    b.give(b.op("Softmax", b.op("MatMul", inner, b.w("B", MANY, 256))), shape=["n", "t", 256])
    check_split(b, tmp_path, {"table", "scales", "A", "B"}, [(1, 2)], sums=2)


def test_table_that_is_looked_up_in_and_made_of_parts_is_whole(tmp_path: Path) -> None:
    """A table with sections of rows that are multiplied separately, such as several codebooks."""
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
