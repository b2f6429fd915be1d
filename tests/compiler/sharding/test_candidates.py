"""Which weights are worth the collectives that sharding them needs."""

from __future__ import annotations

from pathlib import Path

from models.writer import save
from splitc.compiler import Request, plan_model
from tests.helpers.blocks import Block, check_split

# The hidden axis and the inner one, tokens, and the inner axis of what is computed once for all tokens.
HIDDEN, INNER, TOKENS, ONCE = 16, 64, 2048, 4096


def test_weights_read_once_do_not_make_those_read_for_many_tokens_too_costly(tmp_path: Path) -> None:
    """Modulation by one vector, as in diffusion transformers, needs a small sum for a large weight."""
    b = Block()
    x = b.op("Softmax", b.data("x", (1, TOKENS, HIDDEN), [1, "t", HIDDEN]))
    vector = b.op("Softmax", b.data("v", (1, 1, HIDDEN), [1, 1, HIDDEN]))
    once = b.op("MatMul", b.op("Relu", b.op("MatMul", vector, b.w("M1", HIDDEN, ONCE))), b.w("M2", ONCE, HIDDEN))
    for number in range(2):
        inner = b.op("Relu", b.op("MatMul", b.op("Mul", x, once), b.w(f"A{number}", HIDDEN, INNER)))
        x = b.op("Softmax", b.op("MatMul", inner, b.w(f"B{number}", INNER, HIDDEN)))
    b.give(x, shape=[1, "t", HIDDEN])
    check_split(b, tmp_path, {"M1", "M2", "A0", "B0", "A1", "B1"}, [(1, 1)], sums=3)


def test_batch_that_a_table_has_does_not_keep_all_weights_whole(tmp_path: Path) -> None:
    """Sharding it needs no sum, but it is not an axis that other weights shard."""
    b, batch, tokens = Block(), 2, 300
    x = b.data("x", (batch, tokens, HIDDEN))
    for number in range(3):
        inner = b.op("Relu", b.op("MatMul", b.op("Softmax", x), b.w(f"A{number}", HIDDEN, 4 * INNER)))
        x = b.op("MatMul", inner, b.w(f"B{number}", 4 * INNER, HIDDEN))
    y = b.op("Softmax", b.op("Add", x, b.w("table", batch, tokens, HIDDEN)))
    b.give(y, shape=(batch, tokens, HIDDEN))
    check_split(b, tmp_path, {"A0", "B0", "A1", "B1", "A2", "B2"}, [(1, 1)])


def test_logits_are_joined_rather_than_summed(tmp_path: Path) -> None:
    """A head with a norm before it, as BERT's: to split the norm's axis too would cost a sum of all logits."""
    b = Block()
    x = b.op("Softmax", b.data("x", (1, TOKENS, HIDDEN), [1, "t", HIDDEN]))
    inner = b.op("Relu", b.op("MatMul", x, b.w("A", HIDDEN, HIDDEN)))
    normed = b.op("LayerNormalization", inner, b.w("scale", HIDDEN))
    b.give(b.op("MatMul", normed, b.w("head", HIDDEN, 32 * INNER)), shape=[1, "t", 32 * INNER])
    check_split(b, tmp_path, {"head"}, [(1, 1)], whole="A", sums=0)


def test_reasons_of_axes_that_gain_too_little(tmp_path: Path) -> None:
    """An axis without collectives is not said to have some, and one collective is no plural."""
    b = Block()
    x = b.op("Softmax", b.data("x", (1, TOKENS, HIDDEN), [1, "t", HIDDEN]))
    wide = b.op(
        "Softmax", b.op("MatMul", b.op("Relu", b.op("MatMul", x, b.w("A", HIDDEN, ONCE))), b.w("B", ONCE, HIDDEN))
    )
    small = b.op("Relu", b.op("MatMul", wide, b.w("C", HIDDEN, 3)))
    b.give(b.op("Softmax", b.op("MatMul", small, b.w("D", 3, HIDDEN))), shape=[1, "t", HIDDEN])
    b.give(b.op("MatMul", wide, b.w("E", HIDDEN, 2)), name="e", shape=[1, "t", 2])
    save(b.model(), tmp_path / "model.onnx")
    plan = plan_model(tmp_path / "model.onnx", ["cpu0", "cpu1"], Request(split_mode="tensor", spread=True))
    reasons = {weight.name: weight.reason or "" for weight in plan.weights}
    assert "axis of 3: its collective would cost more than it saves" in reasons["C"]
    assert "axis of 2: splitting it would save too little" in reasons["E"]


def test_what_a_dropped_axis_displaced_is_split(tmp_path: Path) -> None:
    """Channels that are summed with others that are needed whole are not split, but the hidden axis is."""
    b = Block()
    x = b.op("Relu", b.op("Conv", b.data("x", (1, 20, 4, 4)), b.w("S", 20, 20, 1, 1)))
    few, others = (b.op("Slice", x, *map(b.ints, bounds)) for bounds in ((0, 8, 1), (8, 20, 1)))
    both = b.op("Concat", b.op("Conv", few, b.w("P", 8, 8, 3, 3), pads=[1] * 4), others, axis=1)
    inner = b.op("Relu", b.op("Conv", both, b.w("U", 16, 20, 1, 1)))
    y = b.op("Add", x, b.op("Conv", inner, b.w("D", 20, 16, 1, 1)))
    b.give(b.op("Softmax", y, axis=1), shape=(1, 20, 4, 4))
    check_split(b, tmp_path, {"U", "D"}, [(1, 1)], whole="P")
