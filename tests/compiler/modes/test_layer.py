"""Stages as separate graphs: which values cross cuts, what is recomputed, and that numbers do not change."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from models.writer import Writer, save
from splitc.compiler import Request, plan_model
from splitc.compiler.analysis import memory
from splitc.compiler.analysis.facts import analyze
from splitc.compiler.analysis.stages import divide_blocks
from splitc.compiler.errors import ModelError
from splitc.compiler.execution.exchange import EngineGraph
from splitc.compiler.execution.run import arena_bytes
from splitc.compiler.lowering.stage_graph import stage_graph
from splitc.compiler.request.shapes import AskedShapes
from splitc.runtime.hardware.devices import parse_devices
from tests.conftest import LAYER, Arrays, assert_close, decoder_feeds, run_split, run_whole
from tests.helpers.fuzz import MORE


def test_only_the_hidden_state_crosses(decoder: Path) -> None:
    plan = plan_model(decoder, parse_devices(["4xcpu"]), LAYER)
    assert [len(cut.values) for cut in plan.cuts] == [1, 1, 1]
    assert all(cut.bytes == 16 * 64 * 4 for cut in plan.cuts)


def test_cache_goes_with_its_layer(decoder: Path) -> None:
    for rank in plan_model(decoder, parse_devices(["4xcpu"]), LAYER).ranks:
        layers = {block.name.rpartition(".")[2] for block in rank.stage.blocks if block.kind == "block"}
        past = {(value.name or "").split(".")[1] for value in rank.stage.feeds if "past_" in (value.name or "")}
        present = {(value.name or "").split(".")[1] for value in rank.stage.outputs if "present" in (value.name or "")}
        assert past == present == layers


def test_memory_of_a_stage_is_found_once(decoder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The search for cuts and the plan both ask for it. It takes a seventh of the planning time."""
    found: list[tuple[ir.Node, ...]] = []

    def note(graph: EngineGraph, *others: Any) -> int:
        found.append(tuple(graph.nodes))
        return arena_bytes(graph, *others)

    monkeypatch.setattr(memory, "arena_bytes", note)
    plan = plan_model(decoder, parse_devices(["4xcpu"]), LAYER)
    assert len(found) == len(set(found)) >= len(plan.ranks)


def test_size_of_what_crosses_that_the_file_has_as_a_number_by_mistake(tmp_path: Path) -> None:
    """As PyTorch's newer exporter writes some values for a batch of one. The unsplit model runs any batch."""
    w, width = Writer(), 64
    value = w.input("x", ir.DataType.FLOAT, ["batch", width])
    for number in range(4):
        weight = np.eye(width, dtype=np.float32) * (1 + number / 8)
        value = w.op("Tanh", w.op("MatMul", value, w.weight(f"weight{number}", ir.tensor(weight))))
        value.shape, value.type = ir.Shape([1, width]), ir.TensorType(ir.DataType.FLOAT)
    w.output(w.op("Identity", value), "y", ir.DataType.FLOAT, ["batch", width])
    save(w.model(), tmp_path / "model.onnx")
    feeds = {"x": np.random.default_rng(0).standard_normal((3, width), dtype=np.float32)}
    split = run_split(
        tmp_path / "model.onnx", tmp_path / "package", "2xcpu", feeds, spread=True, shapes={"x": (1, width)}
    )
    assert_close(split, run_whole(tmp_path / "model.onnx", feeds))


@pytest.mark.parametrize("devices", ["1xcpu", "2xcpu", "5xcpu", "14xcpu"])
def test_any_number_of_stages_gives_the_same(decoder: Path, tmp_path: Path, devices: str) -> None:
    feeds = decoder_feeds()
    assert_close(run_split(decoder, tmp_path / "package", devices, feeds, spread=True), run_whole(decoder, feeds))


def weight(name: str, *shape: int) -> ir.TensorProtocol:
    generator = np.random.default_rng(sum(name.encode()))
    return ir.tensor(generator.standard_normal(shape).astype(np.float32) / 8)


def test_shapes_of_what_a_stage_does_not_see_are_read_elsewhere(tmp_path: Path) -> None:
    """As exporters write it: sizes read off the embedding, and used in every layer."""
    w = Writer()
    x = w.input("x", ir.DataType.FLOAT, ["batch", "length", 64])
    hidden = w.op("MatMul", x, w.weight("first", weight("first", 64, 64)))
    shape = w.op("Shape", hidden)
    for number in range(4):
        product = w.op("MatMul", hidden, w.weight(f"w{number}", weight(f"w{number}", 64, 64)))
        folded = w.op("Reshape", product, w.constant([-1, 16], np.int64))
        hidden = w.op("Add", hidden, w.op("Reshape", w.op("Tanh", folded), shape))
    w.output(hidden, "y", ir.DataType.FLOAT, ["batch", "length", 64])
    save(w.model(), tmp_path / "model.onnx")
    plan = plan_model(tmp_path / "model.onnx", parse_devices(["3xcpu"]), LAYER)
    assert [len(cut.values) for cut in plan.cuts] == [1, 1]
    assert plan.ranks[2].stage.borrowed
    assert not plan.ranks[2].stage.feeds
    feeds = {"x": np.random.default_rng(0).standard_normal((2, 5, 64)).astype(np.float32)}
    actual = run_split(tmp_path / "model.onnx", tmp_path / "package", "3xcpu", feeds)
    assert_close(actual, run_whole(tmp_path / "model.onnx", feeds))


def test_shape_of_a_single_number(tmp_path: Path) -> None:
    """It has no entries. As detectors of torchvision fill their levels' sizes in."""
    w = Writer()
    hidden = w.input("x", ir.DataType.FLOAT, ["batch", 64])
    shape = w.op("Shape", w.op("ReduceMax", hidden, keepdims=0))
    for number in range(4):
        product = w.op("MatMul", hidden, w.weight(f"w{number}", weight(f"w{number}", 64, 64)))
        largest = w.op("Expand", w.op("ReduceMax", product, keepdims=0), shape)
        hidden = w.op("Add", w.op("Tanh", product), largest)
    w.output(hidden, "y", ir.DataType.FLOAT, ["batch", 64])
    save(w.model(), tmp_path / "model.onnx")
    feeds = {"x": np.random.default_rng(0).standard_normal((5, 64)).astype(np.float32)}
    actual = run_split(tmp_path / "model.onnx", tmp_path / "package", "3xcpu", feeds, spread=True)
    assert_close(actual, run_whole(tmp_path / "model.onnx", feeds))


def test_branch_captures_values_and_weights_of_other_stages(write_model: Callable[[str], Path], tmp_path: Path) -> None:
    path = write_model(
        """<ir_version: 8, opset_import: ["" : 17]>
        g (float[n, 4] x, bool c) => (float[n, 4] y)
        <float[4, 4] a = {1,2,3,4,5,6,7,8,9,1,2,3,4,5,6,7}, float[4, 4] b = {2,3,4,5,6,7,8,9,1,2,3,4,5,6,7,8},
         float[4, 4] d = {1,0,2,0,1,0,2,0,1,0,2,0,1,0,2,0}>
        { p = MatMul(x, a)
          q = MatMul(p, b)
          r = If(c) <
            then_branch = t () => (float[n, 4] u) { k = MatMul(q, d)
              u = Add(k, p) },
            else_branch = e () => (float[n, 4] v) { v = Sub(q, p) } >
          y = MatMul(r, d) }""",
    )
    for condition in (True, False):
        feeds: Arrays = {"x": np.ones((3, 4), np.float32), "c": np.array(condition)}
        assert_close(run_split(path, tmp_path / "package", "3xcpu", feeds, spread=True), run_whole(path, feeds))


def test_loop_captures_values_and_weights_of_other_stages(write_model: Callable[[str], Path], tmp_path: Path) -> None:
    path = write_model(
        """<ir_version: 8, opset_import: ["" : 17]>
        g (float[n, 4] x) => (float[n, 4] y)
        <float[4, 4] a = {1,2,3,4,5,6,7,8,9,1,2,3,4,5,6,7}, float[4, 4] b = {2,3,4,5,6,7,8,9,1,2,3,4,5,6,7,8},
         float[4, 4] d = {1,0,2,0,1,0,2,0,1,0,2,0,1,0,2,0}, int64 three = {3}>
        { p = MatMul(x, a)
          q = MatMul(p, b)
          r = Loop(three, , q) <
            body = t (int64 i, bool go, float[n, 4] h) => (bool on, float[n, 4] out) {
              k = MatMul(h, d)
              m = Add(k, p)
              out = Tanh(m)
              on = Identity(go) } >
          y = MatMul(r, d) }""",
    )
    feeds: Arrays = {"x": np.ones((3, 4), np.float32)}
    for devices in ("2xcpu", "3xcpu", "4xcpu"):
        assert_close(run_split(path, tmp_path / "package", devices, feeds, spread=True), run_whole(path, feeds))


def test_model_inside_one_if_is_refused_with_the_reason(write_model: Callable[[str], Path], tmp_path: Path) -> None:
    path = write_model(
        """<ir_version: 8, opset_import: ["" : 17]>
        g (float[n, 4] x, bool c) => (float[n, 4] y)
        <float[4, 4] a = {1,2,3,4,5,6,7,8,9,1,2,3,4,5,6,7}, float[4, 4] b = {2,3,4,5,6,7,8,9,1,2,3,4,5,6,7,8}>
        { y = If(c) <
            then_branch = t () => (float[n, 4] u) { k = MatMul(x, a)
              u = MatMul(k, b) },
            else_branch = e () => (float[n, 4] v) { v = MatMul(x, b) } > }""",
    )
    with pytest.raises(ModelError, match=r"\(If\) holds 100% of the model's weights, and splitc does not cut inside"):
        plan_model(path, parse_devices(["2xcpu"]), LAYER)
    feeds: Arrays = {"x": np.ones((3, 4), np.float32), "c": np.array(True)}
    assert_close(run_split(path, tmp_path / "package", "1xcpu", feeds), run_whole(path, feeds))


def test_output_that_stands_on_free_nodes_alone_is_made(write_model: Callable[[str], Path], tmp_path: Path) -> None:
    path = write_model(
        """<ir_version: 8, opset_import: ["" : 17]>
        g (float[n, 4] x) => (float[n, 4] y, int64[2] s, float[n, 4] x2)
        <float[4, 4] a = {1,2,3,4,5,6,7,8,9,1,2,3,4,5,6,7}, float[4, 4] b = {2,3,4,5,6,7,8,9,1,2,3,4,5,6,7,8}>
        { p = MatMul(x, a)
          y = MatMul(p, b)
          s = Shape(y)
          x2 = Identity(x) }""",
    )
    feeds = {"x": np.ones((3, 4), np.float32)}
    assert_close(run_split(path, tmp_path / "package", "2xcpu", feeds, spread=True), run_whole(path, feeds))


def test_output_that_is_an_input_is_handed_back_under_its_name(
    write_model: Callable[[str], Path], tmp_path: Path
) -> None:
    path = write_model(
        """<ir_version: 8, opset_import: ["" : 17]>
        g (float[n, 4] x, float[n] z) => (float[n] z, float[n, 4] y, float[n, 4] x)
        <float[4, 4] a = {1,2,3,4,5,6,7,8,9,1,2,3,4,5,6,7}, float[4, 4] b = {2,3,4,5,6,7,8,9,1,2,3,4,5,6,7,8}>
        { p = MatMul(x, a)
          y = MatMul(p, b) }"""
    )
    feeds: Arrays = {"x": np.ones((3, 4), np.float32), "z": np.arange(3, dtype=np.float32)}
    actual = run_split(path, tmp_path / "package", "2xcpu", feeds, spread=True)
    assert_close(actual, run_whole(path, feeds))
    assert not np.shares_memory(actual["x"], feeds["x"])


def test_weight_that_several_stages_read_is_in_each_and_counted_in_each(tmp_path: Path) -> None:
    w = Writer()
    hidden = w.input("x", ir.DataType.FLOAT, ["n", 64])
    shared = w.weight("shared", weight("shared", 64, 64))
    for _ in range(6):
        hidden = w.op("Tanh", w.op("MatMul", hidden, shared))
    w.output(hidden, "y", ir.DataType.FLOAT, ["n", 64])
    save(w.model(), tmp_path / "model.onnx")
    plan = plan_model(tmp_path / "model.onnx", parse_devices(["3xcpu"]), LAYER)
    assert [rank.memory.weights for rank in plan.ranks] == [64 * 64 * 4] * 3
    assert [rank.rematerialized.weights for rank in plan.ranks] == [0, 64 * 64 * 4, 64 * 64 * 4]
    feeds = {"x": np.ones((2, 64), np.float32)}
    assert_close(
        run_split(tmp_path / "model.onnx", tmp_path / "package", "3xcpu", feeds),
        run_whole(tmp_path / "model.onnx", feeds),
    )


UNARY = ("Relu", "Tanh", "Neg", "Sigmoid", "Identity", "Abs")
BINARY = ("Add", "Sub", "Mul", "Max", "Min")
WIDTH = 8


@st.composite
def random_models(draw: st.DrawFn) -> ir.Model:
    """Random graphs of small operators: shared weights, long skips, several outputs, weights and inputs as outputs."""
    w = Writer()
    values = [w.input(f"x{number}", ir.DataType.FLOAT, ["n", WIDTH]) for number in range(draw(st.integers(1, 2)))]
    weights = [w.weight(f"w{number}", weight(f"w{number}", WIDTH, WIDTH)) for number in range(draw(st.integers(1, 3)))]
    pick = st.integers(0, 10**6)
    for _ in range(draw(st.integers(3, 16))):
        # Mostly recent values, so that the graph is deep, and now and then an old one.
        recent = values[-3:] if draw(st.booleans()) else values
        value = recent[draw(pick) % len(recent)]
        kind = draw(st.sampled_from(("product", "unary", "binary", "split")))
        if kind == "product":
            values.append(w.op("MatMul", value, weights[draw(pick) % len(weights)]))
        elif kind == "unary":
            values.append(w.op(draw(st.sampled_from(UNARY)), value))
        elif kind == "binary":
            values.append(w.op(draw(st.sampled_from(BINARY)), value, values[draw(pick) % len(values)]))
        else:
            low, high = w.ops("Split", value, w.constant([WIDTH // 2] * 2, np.int64), outputs=2, axis=1)
            values.append(w.op("Concat", high, low, axis=1))
    made = [value for value in values if value.producer() is not None]
    for number in range(draw(st.integers(1, 3))):
        output = w.op("Identity", made[-1] if number == 0 else made[draw(pick) % len(made)])
        w.output(output, f"y{number}", ir.DataType.FLOAT, ["n", WIDTH])
    return w.model()


@pytest.mark.fuzz
@settings(
    max_examples=25 if MORE == 1 else 60 * MORE,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(model=random_models(), cuts=st.sets(st.integers(1, 30), max_size=4))
def test_random_graph_cut_anywhere_gives_the_same_bits(
    model: ir.Model, cuts: set[int], tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Without ONNX Runtime's optimizer, so that stages and model run the same kernels in the same order."""
    import onnxruntime as ort

    options = ort.SessionOptions()
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    folder = tmp_path_factory.mktemp("random")
    save(model, folder / "model.onnx")
    generator = np.random.default_rng(0)
    analysis = analyze(folder / "model.onnx", AskedShapes(), 1 << 30)
    feeds = {
        value.name or "": generator.standard_normal((3, WIDTH)).astype(np.float32)
        for value in analysis.graph.graph.inputs
    }
    whole = ort.InferenceSession(str(folder / "model.onnx"), options, providers=["CPUExecutionProvider"])
    expected = dict(zip((value.name for value in whole.get_outputs()), whole.run(None, feeds)))
    count = len(analysis.partition.blocks)
    ends = sorted({cut for cut in cuts if cut < count} | {count})
    values: Arrays = dict(feeds)
    for number, stage in enumerate(divide_blocks(analysis.graph, analysis.partition, ends)):
        path = folder / f"stage{number}.onnx"
        ir.save(ir.Model(stage_graph(analysis.graph, stage), ir_version=8), path)
        session = ort.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
        used = {value.name: values[value.name] for value in session.get_inputs()}
        values.update(zip((value.name for value in session.get_outputs()), session.run(None, used)))
    for name, array in expected.items():
        np.testing.assert_array_equal(values[name], array)


def test_blocks_go_where_they_are_fast(tmp_path: Path) -> None:
    """A GPU takes more blocks than a CPU device, in either order; two GPUs share them evenly."""
    w = Writer()
    hidden = w.input("x", ir.DataType.FLOAT, [64, 256])
    for number in range(8):
        up = w.op("Relu", w.op("MatMul", hidden, w.weight(f"up{number}", weight(f"up{number}", 256, 512))))
        hidden = w.op("Add", hidden, w.op("MatMul", up, w.weight(f"down{number}", weight(f"down{number}", 512, 256))))
    w.output(hidden, "y", ir.DataType.FLOAT, [64, 256])
    save(w.model(), tmp_path / "model.onnx")
    held = {}
    for devices in (("cuda0", "cpu0"), ("cpu0", "cuda0"), ("cuda0", "cuda1")):
        request = Request(split_mode="layer", spread=True, memory=["4GiB"], engine="onnxruntime")
        plan = plan_model(tmp_path / "model.onnx", parse_devices(devices), request)
        held[devices] = [len(rank.stage.blocks) for rank in plan.ranks]
    assert held["cuda0", "cuda1"] == [4, 4]
    more, less = held["cuda0", "cpu0"]
    assert more > less
    assert held["cpu0", "cuda0"] == [less, more]
