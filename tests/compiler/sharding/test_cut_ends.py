"""Inputs and outputs with axes of several sections are cut by index, such as a convolution's state of several parts."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx_ir as ir
import pytest

from splitc.compiler import compile_model
from splitc.compiler.operators.axes import Factor
from splitc.compiler.sharding.shards import Shards
from splitc.compiler.sharding.shares import Range
from splitc.runtime import Session
from splitc.runtime.package.parts import cut_part, join_parts
from tests.conftest import assert_close, run_whole
from tests.helpers.blocks import Block, check_split, sharded
from tests.helpers.operators import softmax


def convolved(values: int, keys: int, written: type = int) -> Block:
    """Values and keys pass one depthwise convolution, whose last positions are a state.

    torch's exporter writes its sizes as symbols (`written` as str).
    """
    b = Block()
    channels = values + keys
    x = b.data("x", (2, 5, 16), ["batch", "length", 16])
    state = b.data("state", (2, channels, 3), ["batch", written(channels), 3])
    wide = b.op("Transpose", b.op("MatMul", softmax(b, x), b.w("A", 16, channels)), perm=[0, 2, 1])
    joined = b.op("Concat", state, wide, axis=-1)
    b.give(b.op("Slice", joined, b.ints(-3), b.ints(2**31), b.ints(2)), "new", ["batch", channels, 3])
    made = b.op("Relu", b.op("Conv", joined, b.w("kernel", channels, 1, 4), group=channels))
    parts = b.ops("Split", b.op("Transpose", made, perm=[0, 2, 1]), b.ints(values, keys), outputs=2, axis=2)
    sides = [
        b.op("MatMul", part, b.w(name, size, 16)) for part, name, size in zip(parts, "BC", (values, keys), strict=True)
    ]
    b.give(softmax(b, b.op("Add", *sides)), shape=["batch", "length", 16])
    return b


@pytest.mark.parametrize(("values", "keys", "written"), [(32, 16, int), (16, 3, int), (32, 16, str)])
def test_state_of_several_parts(tmp_path: Path, values: int, keys: int, written: type) -> None:
    block, shares = convolved(values, keys, written), ((1, 1), (1, 1, 1, 1), (1, 30, 1))
    check_split(block, tmp_path, ["A", "B", "kernel"], shares, sums=1)


def test_sections_that_may_change_stay_whole(tmp_path: Path) -> None:
    """As with the rows of a request beside rows of the model's own."""
    b = Block()
    x = b.data("x", (4, 8), ["n", 8])
    own = softmax(b, b.op("Mul", b.w("rows", 24, 8), b.data("z", (1, 1))))
    b.give(b.op("Concat", x, own, axis=0), shape=["m", 8])
    for plan in check_split(b, tmp_path, [], shares=((1, 1),)):
        (output,) = plan.analysis.graph.graph.outputs
        assert sharded(plan).shards(0).part("y", sharded(plan).axes(output), output.shape) is None


def test_shards_of_sections() -> None:
    """A shard with all elements is cut like the others: otherwise they would not be gathered."""
    heads, groups = Factor(4), Factor(2)
    axis = (Factor(14, sections=((heads, Factor(3)), (groups,))),)
    whole = np.arange(2 * 14).reshape(2, 14)
    ranges = [(Range(0, 1), Range(0, 1)), (Range(1, 4), Range(0, 2)), (Range(0, 4), Range(0, 2))]
    parts = [Shards({heads: a, groups: b}).part("x", ((Factor(2),), axis), ir.Shape([2, 14])) for a, b in ranges]
    cut = [(part, cut_part(whole, part)) for part in parts if part is not None]
    assert [part.axes[0].places for part, _ in cut] == [[(0, 3), (12, 13)], [(3, 14)], [(0, 14)]]
    assert cut[0][1].tolist() == [[0, 1, 2, 12], [14, 15, 16, 26]]
    np.testing.assert_array_equal(join_parts(cut[:2]), whole)
    np.testing.assert_array_equal(join_parts(cut), whole)


def test_what_is_split_behind_sections_of_any_size(tmp_path: Path) -> None:
    """As patches of an image with rows of the model's own, whose pixels are split: any number of patches comes out."""
    b = Block()
    rows = b.op("Concat", b.data("x", (4, 1), ["n", 1]), b.w("own", 3, 1), axis=0)
    apart = b.op("Reshape", b.op("MatMul", rows, b.w("A", 1, 128)), b.ints(-1, 64))
    b.give(softmax(b, apart), "y", ["pixels", 64])
    (plan,) = check_split(b, tmp_path, ["A"], shares=((1, 1),))
    compile_model(plan, tmp_path / "any")
    with Session(tmp_path / "any") as session:
        for size in (4, 1, 9):
            feeds = {"x": np.linspace(-1, 1, size, dtype=np.float32)[:, None]}
            assert_close(session.run(feeds), run_whole(plan.analysis.graph.path, feeds))


def test_heads_of_tokens_in_windows(tmp_path: Path) -> None:
    """As in Qwen3-VL: only numbers of tokens that the windows divide fit, which no prime is."""
    b = Block()
    x = b.data("x", (12, 16), ["n", 16])
    count = b.op("Sub", b.shape(b.indices("borders", (0, 4, 8, 12), ["k"]), 0), b.ints(1))
    by_head = b.op("Reshape", b.op("MatMul", softmax(b, x), b.w("A", 16, 64)), b.ints(-1, 4, 16))
    shape = b.op("Concat", count, b.op("Div", b.shape(x, 0), count), b.ints(4, 16), axis=0)
    tokens = b.op("Transpose", b.op("Reshape", by_head, shape), perm=[0, 2, 1, 3])
    weights = softmax(b, b.op("MatMul", tokens, b.op("Transpose", tokens, perm=[0, 1, 3, 2])))
    rows = b.op("Reshape", b.op("Transpose", b.op("MatMul", weights, tokens), perm=[0, 2, 1, 3]), b.ints(-1, 64))
    b.give(b.op("MatMul", rows, b.w("B", 64, 16)), shape=["n", 16])
    check_split(b, tmp_path, ["A", "B"], shares=((1, 1), (1, 30, 1)))
