"""What a stage is predicted to hold, against sizes counted by hand and against the planner's bound."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import pytest

from models.llama import Size, build
from models.llama_fused import build as build_fused
from models.writer import Writer, save
from splitc.compiler import Plan, Request, plan_model
from splitc.compiler.analysis.costs import MAPPED_AROUND
from splitc.compiler.analysis.facts import analyze
from splitc.compiler.analysis.loading import Loading
from splitc.compiler.analysis.memory import Held, stage_memory
from splitc.compiler.analysis.range_memory import RangeMemory
from splitc.compiler.analysis.stages import divide_blocks
from splitc.compiler.request.shapes import AskedShapes
from splitc.runtime.errors import DoesNotFitError
from splitc.runtime.hardware.devices import parse_devices
from splitc.runtime.package.states import State
from tests.conftest import KEPT

# Budgets here are those of tiny models.
pytestmark = pytest.mark.usefixtures("bare_engines")


def test_sizes_are_those_counted_by_hand(write_model: Callable[[str], Path]) -> None:
    """x [4, 8] -> a [4, 16] -> b [4, 16] -> v [1, 4, 16], a view of b -> y [1, 4, 2] and rest [1, 4, 14], in float32.

    Each takes a multiple of 256 bytes of the arena: a and b at once, then y in the place of a, and rest after b.
    """
    path = write_model(
        """<ir_version: 8, opset_import: ["" : 17]>
        g (float[n, 8] x) => (float[1, n, 2] y) <int64[2] sizes = {2, 14}, int64[1] zero = {0}>
        { a = Concat <axis = 1> (x, x)
          b = Softmax(a)
          v = Unsqueeze(b, zero)
          y, rest = Split <axis = 2> (v, sizes) }"""
    )
    analysis = analyze(path, AskedShapes({"x": (4, 8)}), 1)
    (stage,) = divide_blocks(analysis.graph, analysis.partition, [len(analysis.partition.blocks)])
    memory = stage_memory(analysis.costs, analysis.states, stage)
    assert memory.weights == 3 * 8
    assert memory.cache == 0
    assert memory.activations == 4 * 8 * 4 + 3 * 256


def test_order_of_the_file_is_not_that_of_the_run(write_model: Callable[[str], Path]) -> None:
    """Quantizers write all weights at the top. ONNX Runtime computes each right before it is read."""
    names = [f"w{number}" for number in range(8)]
    tops = "\n".join(f"{name} = DequantizeLinear(q, scale)" for name in names)
    products = "\n".join(f"x{n + 1} = MatMul(x{n}, {name})" for n, name in enumerate(names))
    weights = ", ".join(["0"] * 64 * 64)
    path = write_model(
        f"""<ir_version: 8, opset_import: ["" : 17]>
        g (float[n, 64] x0) => (float[n, 64] x8) <int8[64, 64] q = {{{weights}}}, float scale = {{1.0}}>
        {{ {tops} {products} }}"""
    )
    analysis = analyze(path, AskedShapes({"x0": (1, 64)}), 1)
    (stage,) = divide_blocks(analysis.graph, analysis.partition, [len(analysis.partition.blocks)])
    assert stage_memory(analysis.costs, analysis.states, stage).activations < 3 * 64 * 64 * 4


def test_state_takes_the_place_of_what_was_freed_before_it(write_model: Callable[[str], Path]) -> None:
    """Its 768 bytes take all 1,280 of a, which then c can not have. Beside them are x, and b and y with 256 each."""
    path = write_model(
        """<ir_version: 8, opset_import: ["" : 17]>
        g (float[n, 64] x, float[n, 192] past) => (float[n, 1] out, float[n, 192] present) <int64[1] one = {1}>
        { a = Concat <axis = 1> (x, x, x, x, x)
          b = ReduceSum(a, one)
          present = Add(past, b)
          y = ReduceSum(present, one)
          moved = Add(x, y)
          c = Concat <axis = 1> (moved, moved, moved, moved, moved)
          out = ReduceSum(c, one) }"""
    )
    analysis = analyze(path, AskedShapes({"x": (1, 64)}), 1)
    (stage,) = divide_blocks(analysis.graph, analysis.partition, [len(analysis.partition.blocks)])
    memory = stage_memory(analysis.costs, [State("past", "present")], stage)
    assert memory.cache == 2 * 768
    assert memory.activations == 256 + 2 * 1280 + 2 * 256 - 768


def test_matrices_are_packed_one_by_one(write_model: Callable[[str], Path]) -> None:
    """Each beside what it is made of, 64 and 48 KiB. The second one has 24 columns, and 32 when it is packed."""
    path = write_model(
        f"""<ir_version: 8, opset_import: ["" : 17]>
        g (float[n, 32] x) => (float[n, 24] y)
        <float[32, 512] w = {{{",".join(["1"] * 32 * 512)}}}, float[512, 24] v = {{{",".join(["1"] * 512 * 24)}}}>
        {{ h = MatMul(x, w)
           y = MatMul(h, v) }}"""
    )
    (rank,) = plan_model(path, ["cpu0"], Request(split_mode="layer", shapes={"x": (1, 32)})).ranks
    assert rank.memory.weights == 2 * 65536
    assert rank.memory.total == rank.memory.loading.most == 2 * 65536 + 512 * 24 * 4
    (rank,) = plan_model(path, ["cpu0"], Request(split_mode="layer", shapes={"x": (100, 32)})).ranks
    assert rank.memory.total == 2 * 65536 + 100 * 4 * (32 + 512) + 38 * 256 + (32 << 10)


def test_kernels_are_put_in_blocks_before(write_model: Callable[[str], Path]) -> None:
    """They are there thrice beside their blocks. One that is folded stays until all are done; one of a row is read."""
    path = write_model(
        f"""<ir_version: 8, opset_import: ["" : 17]>
        g (float[1, 16, 2, 2] x, float[1, 16, 4] r) => (float[1, 16, 2, 2] y, float[1, 16, 4] s)
        <float[16, 16, 1, 1] w = {{{",".join(["1"] * 256)}}}, float[16, 16, 1] u = {{{",".join(["1"] * 256)}}}>
        {{ v = Neg(w)
           h = Conv(x, w)
           y = Conv(h, v)
           s = Conv(r, u) }}"""
    )
    loading = plan_model(path, ["cpu0"], Request(split_mode="layer")).ranks[0].memory.loading
    assert loading == Loading(most=(1 + 2 + 3) * 1024, optimizing=(1 + 2 + 3) * 1024, made=2 * 1024)


def test_kernels_that_factors_become_part_of_are_made_anew(write_model: Callable[[str], Path]) -> None:
    """They stay until all are in blocks."""
    path = write_model(
        f"""<ir_version: 8, opset_import: ["" : 17]>
        g (float[1, 16, 2, 2] x) => (float[1, 16, 2, 2] y)
        <float[16, 16, 1, 1] w = {{{",".join(["1"] * 256)}}}, float[16, 1, 1] f = {{{",".join(["2"] * 16)}}}>
        {{ h = Conv(x, w)
           y = Mul(h, f) }}"""
    )
    loading = plan_model(path, ["cpu0"], Request(split_mode="layer")).ranks[0].memory.loading
    assert (loading.most, loading.made) == ((1 + 1 + 3) * 1024, 1024)


def test_stack_of_matrices_is_not_packed(write_model: Callable[[str], Path]) -> None:
    path = write_model(
        f"""<ir_version: 8, opset_import: ["" : 17]>
        g (float[4, n, 8] x) => (float[4, n, 8] y)
        <float[4, 8, 8] w = {{{",".join(["1"] * 256)}}}> {{ y = MatMul(x, w) }}"""
    )
    (rank,) = plan_model(path, ["cpu0"], Request(split_mode="layer", shapes={"x": (4, 1, 8)})).ranks
    assert (rank.memory.weights, rank.memory.loading) == (1024, Loading())


@pytest.mark.parametrize(("mode", "devices"), [("layer", "1xcpu"), ("tensor", "2xcpu")])
def test_what_is_folded_counts_in_place_of_what_it_is_made_of(
    write_model: Callable[[str], Path], mode: str, devices: str
) -> None:
    """A weight in half precision that is cast, and one row that is repeated 64 times."""
    path = write_model(
        f"""<ir_version: 8, opset_import: ["" : 17]>
        g (float[2, 64] x) => (float[2, 64] y)
        <float16[64, 64] half = {{{",".join(["1"] * 64 * 64)}}}, float[1, 64] row = {{{",".join(["1"] * 64)}}},
         int64[2] times = {{64, 1}}>
        {{ w = Cast <to = 1> (half)
           h = MatMul(x, w)
           v = Tile(row, times)
           y = MatMul(h, v) }}"""
    )
    ranks = plan_model(path, parse_devices([devices]), Request(split_mode=mode, memory=["1MiB"])).ranks
    assert [rank.memory.weights for rank in ranks] == [2 * 64 * 64 * 4 // len(ranks)] * len(ranks)
    assert [rank.memory.loading.most for rank in ranks] == [3 * 64 * 64 * 4 // len(ranks)] * len(ranks)


def test_shard_of_a_table_has_its_share_of_the_rows_that_are_read(tmp_path: Path) -> None:
    save(build(Size(hidden=64, vocabulary=8192)), tmp_path / "model.onnx")
    request = Request(split_mode="layer", shapes={"input_ids": (1, 4)}, memory=["1GiB"])
    plan = plan_model(tmp_path / "model.onnx", "1xcpu", request)
    ((table, left),) = plan.analysis.costs.in_files.items()
    assert left == 8192 * 64 * 4 - 4 * MAPPED_AROUND
    costs, stage = plan.analysis.costs, plan.ranks[0].stage
    whole = costs.value_bytes(table)
    for size in (whole, whole // 2):
        memory = stage_memory(
            costs, plan.analysis.states, stage, Held({table: size}, costs.value_bytes, costs.shapes_of)
        )
        assert memory.in_files == left * size // whole


def embedding(tmp_path: Path, dtype: ir.DataType) -> Plan:
    """Four of a table's 8,192 rows, a norm, and two products."""
    w = Writer(17)
    table, scale, up, down = (
        w.weight(name, ir.tensor(np.ones(shape, dtype.numpy())))
        for name, shape in {"table": (8192, 64), "scale": (64,), "up": (64, 512), "down": (512, 64)}.items()
    )
    x = w.op("Gather", table, w.input("ids", ir.DataType.INT64, ["n"]))
    x = w.op("MatMul", w.op("Relu", w.op("MatMul", w.op("LayerNormalization", x, scale), up)), down)
    w.output(x, "y", dtype, ["n", 64])
    save(w.model(), tmp_path / "model.onnx")
    request = Request(split_mode="layer", shapes={"ids": (4,)}, memory=["1GiB"])
    return plan_model(tmp_path / "model.onnx", "1xcpu", request)


def test_halves_are_singles_on_cpus(tmp_path: Path) -> None:
    """Weights, what is packed while loading, and values; rows are looked up in halves."""
    halves, singles = (embedding(tmp_path, dtype).ranks[0].memory for dtype in (ir.DataType.FLOAT16, ir.DataType.FLOAT))
    assert singles.loading.most == 3 * 64 * 512 * 4 == halves.loading.most - 64 * 4
    assert singles.weights - halves.weights == singles.in_files - halves.in_files == 8192 * 64 * 2
    assert halves.activations == singles.activations


def test_rows_of_a_table_of_halves_are_singles_on_cpus(tmp_path: Path) -> None:
    """Other ranks' rows are masked, which no kernel does in halves."""
    plan = embedding(tmp_path, ir.DataType.FLOAT16)
    costs, size = plan.analysis.costs, 4096 * 64 * 2
    (table,) = costs.in_files

    def shapes(node: ir.Node) -> Any:
        (first, *others), outputs = costs.shapes_of(node)
        return [(4096, 64) if node.op_type == "Gather" else first, *others], outputs

    products = {weight: size for weight, size in costs.held(plan.ranks[0].stage.nodes).items() if weight != table}
    held, less = (Held({**own, **products}, costs.value_bytes, shapes) for own in ({table: size}, {table: 0}))
    memory, without = (stage_memory(costs, plan.analysis.states, plan.ranks[0].stage, one) for one in (held, less))
    assert (memory.weights - without.weights, memory.in_files) == (2 * size, 0)
    # It is there while the products' weights are packed.
    assert memory.loading.most - without.loading.most == memory.loading.made - without.loading.made == 2 * size


def test_weights_in_8_bits_are_packed_with_scales_for_blocks(tmp_path: Path) -> None:
    """ONNX Runtime makes a DequantizeLinear and a product one node, in place of values in single precision."""
    w = Writer(17)
    x = w.input("x", ir.DataType.FLOAT, ["n", 256])
    for name in "ab":
        scales = w.weight(f"{name}_scales", ir.tensor(np.ones(256, np.float32)))
        weight = w.weight(name, ir.tensor(np.ones((256, 256), np.int8)))
        x = w.op("MatMul", w.op("Relu", x), w.op("DequantizeLinear", weight, scales, axis=1))
    w.output(x, "y", ir.DataType.FLOAT, ["n", 256])
    save(w.model(), tmp_path / "model.onnx")
    request = Request(split_mode="layer", shapes={"x": (2, 256)}, memory=["1GiB"])
    memory = plan_model(tmp_path / "model.onnx", "1xcpu", request).ranks[0].memory
    own, scales_bytes = 256 * 256, 2 * 256 * 4
    assert memory.weights == 2 * own * 11 // 8 + scales_bytes
    assert memory.loading.made == 2 * own * 9 // 8  # in no file
    assert memory.loading.most == 2 * own * 11 // 8 + own * 9 // 8
    assert memory.activations < own


def test_cache_that_is_written_in_place_is_one_array(tmp_path: Path) -> None:
    size = Size(layers=2, hidden=64, heads=4, kv_heads=2)
    save(build_fused(size), tmp_path / "model.onnx")
    shapes = {"past_key_values.0.key": (1, 2, 40, 16), "input_ids": (1, 1)}
    for mode, devices in (("layer", "1xcpu"), ("tensor", "2xcpu")):
        request = Request(split_mode=mode, shapes=shapes, memory=["1GiB"])
        plan = plan_model(tmp_path / "model.onnx", parse_devices([devices]), request)
        assert all(state.in_place for state in plan.analysis.states)
        assert sum(rank.memory.cache for rank in plan.ranks) == 2 * 2 * (2 * 41 * 16 * 4)


def test_cache_is_both_past_and_present(decoder: Path) -> None:
    shapes = {"input_ids": (2, 3), "past_key_values.0.key": (2, 2, 5, 16)}
    plan = plan_model(decoder, parse_devices(["2xcpu"]), Request(split_mode="layer", shapes=shapes))
    one_layer = 2 * (2 * 2 * (5 + 8) * 16 * 4)
    assert [rank.memory.cache for rank in plan.ranks] == [one_layer, one_layer]


def test_bound_for_the_planner_is_never_too_large(decoder: Path) -> None:
    analysis = analyze(decoder, AskedShapes({"input_ids": (2, 16)}), 12)
    quick = RangeMemory(analysis.costs, analysis.states, analysis.partition)
    count = len(analysis.partition.blocks)
    for start in (0, 1, count // 2, count - 1):
        for end in range(start + 1, count + 1):
            ends = sorted({start, end, count} - {0})
            stage = divide_blocks(analysis.graph, analysis.partition, ends)[ends.index(end)]
            exact = stage_memory(analysis.costs, analysis.states, stage)
            assert exact.weights == quick.weights(start, end)
            assert quick.at_least(start, end) <= exact.total == quick.exact(start, end)


def test_longer_inputs_need_more_and_may_not_fit(decoder: Path) -> None:
    devices = parse_devices(["2xcpu"])
    assert plan_model(
        decoder, devices, Request(split_mode="layer", memory=["1MiB"], shapes={"input_ids": (1, 16)})
    ).ranks
    with pytest.raises(DoesNotFitError, match="The first block that does not fit"):
        plan_model(decoder, devices, Request(split_mode="layer", memory=["1MiB"], shapes={"input_ids": (8, 512)}))


def write_deep_mask(path: Path) -> Path:
    """Four layers of 256 x 1024 and back. Each stage computes the mask again, by a chain of values of l x l."""
    w = Writer()
    hidden = w.input("x", ir.DataType.FLOAT, ["l", 256])
    flags = w.input("m", ir.DataType.FLOAT, ["l"])
    rows, columns = (w.op("Unsqueeze", flags, w.constant([axis], np.int64)) for axis in (0, 1))
    far = w.op("Sub", rows, columns)
    kinds = [w.op(kind, far) for kind in ("Abs", "Neg", "Sigmoid", "Tanh")]
    mask = w.op("ReduceMax", w.op("Concat", *kinds, axis=1), axes=[1], keepdims=1)
    for number in range(4):
        up = w.op("MatMul", hidden, w.weight(f"up{number}", ir.tensor(np.ones((256, 1024), np.float32))))
        down = w.op("MatMul", up, w.weight(f"down{number}", ir.tensor(np.ones((1024, 256), np.float32))))
        hidden = w.op("Mul", w.op("Add", hidden, down), mask)
    w.output(hidden, "y", ir.DataType.FLOAT, ["l", 256])
    save(w.model(), path)
    return path


def test_what_is_computed_again_counts_in_the_bound(tmp_path: Path) -> None:
    analysis = analyze(write_deep_mask(tmp_path / "model.onnx"), AskedShapes({"x": (1024, 256), "m": (1024,)}), 4)
    quick = RangeMemory(analysis.costs, analysis.states, analysis.partition)
    assert analysis.partition.rematerializable
    count = len(analysis.partition.blocks)
    for start in range(count):
        for end in range(start + 1, count + 1):
            bound = quick.at_least(start, end)
            assert 0.8 * quick.exact(start, end) <= bound <= quick.exact(start, end)


@pytest.mark.parametrize("mode", ["layer", "tensor", "row"])
def test_each_plan_fits_its_budgets_or_is_refused(tmp_path: Path, mode: str) -> None:
    path = write_deep_mask(tmp_path / "model.onnx")
    KEPT.models.add(path)
    planned = 0
    for budget in range(38, 66, 2):
        request = Request(split_mode=mode, memory=[f"{budget}MiB"], shapes={"x": (1024, 256), "m": (1024,)})
        try:
            plan = plan_model(path, parse_devices(["2xcpu"]), request)
        except DoesNotFitError:
            continue
        planned += 1
        assert all(rank.memory.total <= budget << 20 for rank in plan.ranks)
    assert 0 < planned < 14


@pytest.mark.parametrize("asked", ["h, s", ", s"])
def test_gates_of_all_steps_are_in_memory(write_model: Callable[[str], Path], asked: str) -> None:
    """Also where the last states alone are asked for: then the node's first output is none."""
    path = write_model(
        f"""<ir_version: 8, opset_import: ["" : 17]>
        g (float[n, 1, 8] x) => (float[1, 1, 64] s)
        <float[1, 256, 8] w = {{{",".join(["1"] * 256 * 8)}}}, float[1, 256, 64] r = {{{",".join(["1"] * 256 * 64)}}}>
        {{ {asked} = LSTM<hidden_size = 64>(x, w, r) }}"""
    )
    (rank,) = plan_model(path, ["cpu0"], Request(split_mode="layer", shapes={"x": (1000, 1, 8)})).ranks
    assert rank.memory.activations >= 1000 * (256 + 8) * 4
