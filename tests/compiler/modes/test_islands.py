"""Islands: nodes that shard weights although their neighbours need these axes whole."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx_ir as ir
import pytest

from models.writer import save
from splitc.compiler import Request, plan_model
from splitc.compiler.analysis.facts import Analysis
from splitc.compiler.lowering.communication import communicates
from splitc.compiler.lowering.rank_graph import rank_graph
from splitc.compiler.modes import tensor
from splitc.compiler.modes.replanning import plan_from_file
from splitc.compiler.modes.tensor_axes import TensorAxes, settle, small_axes
from splitc.compiler.planning.plan_file import to_file, write_plan
from splitc.compiler.sharding.axis_map import Island
from splitc.runtime.errors import DoesNotFitError, MisuseError
from tests.helpers.blocks import Block, check_split, sharded
from tests.helpers.operators import softmax

# Budgets here are those of tiny models.
pytestmark = pytest.mark.usefixtures("bare_engines")

# Even shares, uneven ones, and some with which ranks get no unit of the narrow axes.
SHARES = ((1, 1), (5, 1), (30, 1, 1))
ROWS, HIDDEN, WIDE = 5, 12, 8


@pytest.fixture
def all_islands(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make any island worth its collectives."""
    monkeypatch.setattr(tensor, "fast_axes", lambda analysis, count, *_: small_axes(analysis, count))


def head(rows: int = ROWS, hidden: int = HIDDEN, wide: int = WIDE, opset: int = 17) -> Block:
    """x A, between nodes that need both axes of A whole."""
    b = Block(opset)
    x = softmax(b, b.data("x", (rows, hidden), ["n", hidden]))
    b.give(softmax(b, b.op("MatMul", x, b.w("A", hidden, wide))), shape=["n", wide])
    return b


def turned_head() -> Block:
    """As `head`, with a weight that engines turn, as torch exports a layer without its optimizer."""
    b = Block()
    x = softmax(b, b.data("x", (ROWS, HIDDEN), ["n", HIDDEN]))
    turned = b.op("Transpose", b.w("A", WIDE, HIDDEN), perm=[1, 0])
    b.give(softmax(b, b.op("MatMul", x, turned)), shape=["n", WIDE])
    return b


def convolution() -> Block:
    b = Block()
    scale, shift = (
        b.weight("s", ir.tensor(np.ones(HIDDEN, np.float32))),
        b.weight("t", ir.tensor(np.zeros(HIDDEN, np.float32))),
    )
    x = b.data("x", (2, HIDDEN, 6, 6), ["n", HIDDEN, 6, 6])
    normed = b.op("InstanceNormalization", x, scale, shift)
    first = b.op("Softmax", normed, axis=1)
    made = b.op("Conv", first, b.w("A", HIDDEN, HIDDEN, 3, 3), b.w("bias", HIDDEN), pads=[1, 1, 1, 1])
    b.give(b.op("Softmax", made, axis=1), shape=["n", HIDDEN, 6, 6])
    return b


def quantized(opset: int = 17) -> Block:
    """A product of 8-bit integers. Its output is gathered, since partial sums would be rounded."""
    b = Block(opset)
    scale, zero = b.constant(0.05, np.float32), b.constant(128, np.uint8)
    x = b.op("QuantizeLinear", softmax(b, b.data("x", (ROWS, HIDDEN), ["n", HIDDEN])), scale, zero)
    weight = b.weight("A", ir.tensor(np.random.default_rng(0).integers(90, 160, (HIDDEN, WIDE), np.uint8)))
    product = b.op("QLinearMatMul", x, scale, zero, weight, scale, zero, scale, zero)
    b.give(softmax(b, b.op("DequantizeLinear", product, scale, zero)), shape=["n", WIDE])
    return b


def normed() -> Block:
    """As `quantized`, behind a norm of joined columns, whose vectors are a large part of this model's weights."""
    b = Block()
    scale, zero = b.constant(0.05, np.float32), b.constant(128, np.uint8)
    x = b.data("x", (ROWS, HIDDEN), ["n", HIDDEN])
    wide = b.op("Concat", x, x, axis=-1)
    norm = b.op("LayerNormalization", wide, b.w("scale", 2 * HIDDEN), b.w("shift", 2 * HIDDEN))
    weight = b.weight("A", ir.tensor(np.random.default_rng(0).integers(90, 160, (2 * HIDDEN, WIDE), np.uint8)))
    product = b.op(
        "QLinearMatMul", b.op("QuantizeLinear", norm, scale, zero), scale, zero, weight, scale, zero, scale, zero
    )
    b.give(softmax(b, b.op("DequantizeLinear", product, scale, zero)), shape=["n", WIDE])
    return b


@pytest.mark.parametrize(
    "block",
    [
        head,
        turned_head,
        lambda: head(wide=2),
        lambda: head(opset=10),
        convolution,
        quantized,
        lambda: quantized(opset=12),
        normed,
    ],
)
def test_shards_of_an_island_are_joined(block: Callable[[], Block], tmp_path: Path, all_islands: None) -> None:
    plans = check_split(block(), tmp_path, "A", SHARES, sums=0)
    assert all(plan.split.collectives == 1 for plan in plans)


def test_weight_of_several_steps_is_split(tmp_path: Path, all_islands: None) -> None:
    """Each step of a recurrent network is an island, of the same weight."""
    b = Block()
    state, weight = softmax(b, b.data("x", (ROWS, HIDDEN), ["n", HIDDEN])), b.w("A", HIDDEN, HIDDEN)
    for _ in range(3):
        state = b.op("Tanh", b.op("Add", b.op("MatMul", state, weight), state))
    b.give(softmax(b, state), shape=["n", HIDDEN])
    plans = check_split(b, tmp_path, "A", SHARES, sums=0)
    assert all(plan.split.collectives == 3 for plan in plans)


def test_8_bit_integers_are_joined_as_they_are(tmp_path: Path, all_islands: None) -> None:
    for plan in check_split(quantized(), tmp_path, "A", [(1, 1)]):
        split = sharded(plan)
        graph = rank_graph(split, plan.ranks[0].stage, 0)
        (joined,) = (node for node in graph if communicates(node))
        assert joined.outputs[0].dtype == ir.DataType.UINT8
        assert not any(node.op_type == "Cast" for node in graph)


def test_what_goes_into_an_island_is_joined_and_cut(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its inputs are sharded outside and inside along different axes."""

    def second_product(analysis: Analysis, count: int, *_: object) -> TensorAxes:
        product = [node for node in analysis.graph.nodes if node.op_type == "MatMul"][-1]
        return settle(analysis, count, (Island(product, ((0, 1),), ()),))

    monkeypatch.setattr(tensor, "fast_axes", second_product)
    b = Block()
    x = softmax(b, b.data("x", (ROWS, HIDDEN), ["n", HIDDEN]))
    inner = b.op("Relu", b.op("MatMul", x, b.w("A", HIDDEN, WIDE)))
    b.give(softmax(b, b.op("MatMul", inner, b.w("B", WIDE, HIDDEN))), shape=["n", HIDDEN])
    for plan in check_split(b, tmp_path, "AB", SHARES):
        (joined,), (summed,) = sharded(plan).sums.joined, sharded(plan).sums.summed
        assert [node.op_type for node in (joined.producer(), summed.producer()) if node] == ["Relu", "MatMul"]


def test_ranks_that_share_a_group_join_it_once(tmp_path: Path, all_islands: None) -> None:
    """More ranks than groups of a convolution divide its channels, and have the same of its sum."""
    b = Block()
    x = b.data("x", (2, HIDDEN, 6, 6), ["n", HIDDEN, 6, 6])
    grouped = b.op("Conv", b.op("Softmax", x, axis=1), b.w("A", HIDDEN, HIDDEN // 2, 1, 1), group=2)
    dense = b.op("Conv", b.op("Relu", grouped), b.w("B", HIDDEN, HIDDEN, 1, 1))
    both = b.op("Add", b.op("Relu", dense), grouped)
    b.give(b.op("Conv", both, b.w("C", HIDDEN, HIDDEN // 2, 1, 1), group=2), shape=["n", HIDDEN, 6, 6])
    check_split(b, tmp_path, "ABC", [(1, 1, 1), (2, 1, 1, 3)])


def test_booleans_enter_islands(tmp_path: Path, all_islands: None) -> None:
    """Collectives do not sum them: they are cast."""
    b = Block()
    x = softmax(b, b.data("x", (ROWS, HIDDEN), [ROWS, HIDDEN]))
    y = b.op("MatMul", x, b.w("A", HIDDEN, WIDE))
    kept = b.op("Where", b.op("Not", b.op("Greater", y, b.w("B", ROWS, WIDE))), y, b.w("C", ROWS, WIDE))
    b.give(b.op("Softmax", b.op("Softmax", kept, axis=0), axis=1), shape=[ROWS, WIDE])
    check_split(b, tmp_path, "ABC", [(1, 1), (5, 1)])


@pytest.fixture
def two_products(tmp_path: Path) -> Path:
    return write_products(tmp_path, 2048)


def write_products(folder: Path, inner_size: int) -> Path:
    """Two products that are sharded anyway, and one that only an island shards."""
    b = Block()
    x = softmax(b, b.data("x", (ROWS, 256), ["n", 256]))
    inner = b.op("MatMul", b.op("Relu", b.op("MatMul", x, b.w("A", 256, inner_size))), b.w("B", inner_size, 256))
    b.give(softmax(b, b.op("MatMul", softmax(b, inner), b.w("C", 256, 8192))), shape=["n", 8192])
    save(b.model(), folder / "model.onnx")
    return folder / "model.onnx"


def split_weights(model: Path, link: str, memory: str) -> set[str]:
    """The weights that two ranks shard with this link and memory."""
    request = Request(split_mode="tensor", interconnect=link, memory=[memory], shapes={"x": (ROWS, 256)})
    plan = plan_model(model, ["host0/cpu0", "host1/cpu0"], request)
    return {weight.name for weight in plan.weights if weight.split}


def test_island_saves_more_than_its_collective_takes(two_products: Path) -> None:
    assert split_weights(two_products, "1000GB/s,0us", "1GiB") == {"A", "B", "C"}
    assert split_weights(two_products, "25GB/s,1s", "1GiB") == {"A", "B"}


def test_slow_island_is_worth_it_where_nothing_else_fits(two_products: Path) -> None:
    assert split_weights(two_products, "25GB/s,1s", "10MiB") == {"A", "B", "C"}
    with pytest.raises(DoesNotFitError):
        split_weights(two_products, "25GB/s,1s", "4MiB")


def test_sum_of_small_products_is_not_enough(tmp_path: Path) -> None:
    """Without the island, a hundredth of the weights is sharded."""
    assert split_weights(write_products(tmp_path, 64), "25GB/s,1s", "1GiB") == {"A", "B", "C"}


def test_plan_file_keeps_islands(tmp_path: Path, all_islands: None) -> None:
    save(head().model(), tmp_path / "model.onnx")
    plan, path = plan_model(tmp_path / "model.onnx", ["2xcpu"], Request(split_mode="tensor")), tmp_path / "plan.json"
    write_plan(plan, path)
    assert len(to_file(plan).islands) == 1
    assert to_file(plan_from_file(tmp_path / "model.onnx", path)) == to_file(plan)
    content = json.loads(path.read_text())
    path.write_text(json.dumps({**content, "islands": ["nothing"]}))
    with pytest.raises(MisuseError, match='the line "nothing" under "islands", and the model makes no such value'):
        plan_from_file(tmp_path / "model.onnx", path)


@pytest.mark.parametrize("layers, classes", [(1, 4), (1, 24), (5, 96)])
def test_head_alone_is_not_enough(layers: int, classes: int, tmp_path: Path) -> None:
    """If only the head is sharded without islands, islands are taken at any cost in time, if they fit."""
    b, names = Block(), [f"A{layer}" for layer in range(layers)]
    x = softmax(b, b.data("x", (ROWS, 96), ["n", 96]))
    for name in names:
        x = b.op("Add", x, softmax(b, b.op("MatMul", softmax(b, x), b.w(name, 96, 96))))
    logits = b.op("Gemm", b.op("Exp", softmax(b, b.op("Sqrt", x))), b.w("head", 96, classes))
    b.give(logits, shape=["n", classes])
    save(b.model(), tmp_path / "model.onnx")
    request = Request(split_mode="tensor", shapes={"x": (ROWS, 96)})
    plan = plan_model(tmp_path / "model.onnx", ["2xcpu"], request)
    assert {weight.name for weight in plan.weights if weight.split} == {*names, "head"}
