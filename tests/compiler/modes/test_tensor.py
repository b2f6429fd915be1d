"""Tensor mode from the user's view: plans, messages, refusals, and checks."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import onnx_ir as ir
import pytest
from typer.testing import CliRunner

from models.writer import save
from splitc.compiler import Plan, Request, compile_model, plan_model
from splitc.compiler.errors import CannotSplitError, ModelError
from splitc.compiler.modes.replanning import plan_from_file
from splitc.compiler.operators import registry
from splitc.compiler.operators.operation import Operation
from splitc.compiler.planning.plan_file import to_file, write_plan
from splitc.runtime import Session
from splitc.runtime.cli.app import app
from splitc.runtime.errors import DoesNotFitError, MisuseError
from splitc.runtime.package.manifest_file import read_manifest
from splitc.runtime.package.steps import Reduce
from tests.conftest import DECODER, assert_close, decoder_feeds, run_whole
from tests.helpers.blocks import FLOAT, INT, Block, sharded
from tests.helpers.measured import measured
from tests.helpers.operators import softmax

TENSOR = Request(split_mode="tensor")


@pytest.fixture(scope="module")
def two_ranks(decoder: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Plan, Path]:
    """A plan and its package."""
    plan, package = plan_model(decoder, ["2xcpu"], TENSOR), tmp_path_factory.mktemp("two") / "package"
    compile_model(plan, package, verify=False)
    return plan, package


@pytest.fixture(scope="module")
def three_ranks(decoder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    package = tmp_path_factory.mktemp("three") / "package"
    compile_model(plan_model(decoder, ["3xcpu"], TENSOR), package, verify=False)
    return package


def test_decoder_takes_two_sums_a_layer_and_its_blocks_are_split(two_ranks: tuple[Plan, Path]) -> None:
    plan, package = two_ranks
    inside = [weight for weight in plan.weights if weight.in_block]
    assert sum(each.split for each in inside) > 0.95 * sum(each.bytes for each in inside)
    assert sharded(plan).sums.count == 2 * DECODER.layers
    manifest = read_manifest(package)
    assert manifest.collectives == 2 * DECODER.layers
    for number, rank in enumerate(manifest.ranks):
        (engine,) = rank.engines
        assert engine.group == [0, 1]
        nodes = [node.op_type for node in ir.load(package / f"rank{number}" / "stage0.onnx").graph]
        assert nodes.count("AllReduce") == manifest.collectives
        assert rank.weights_bytes < 0.6 * sum(weight.bytes for weight in plan.weights)
        cache = [part for part in rank.parts if part.name.startswith(("past", "present"))]
        assert len(cache) == 4 * DECODER.layers


def test_same_request_gives_the_same_bits(three_ranks: Path) -> None:
    feeds = decoder_feeds()
    with Session(three_ranks) as session:
        first = session.run(feeds)
        for _ in range(20):
            again = session.run(feeds)
            assert all(first[name].tobytes() == again[name].tobytes() for name in first)


def test_plan_file_keeps_shares_and_stages(decoder: Path, tmp_path: Path) -> None:
    request = Request(split_mode="tensor", pipeline_stages=2, tensor_split=[3, 1, 1, 1])
    plan = plan_model(decoder, ["4xcpu"], request)
    write_plan(plan, tmp_path / "plan.json")
    again = plan_from_file(decoder, tmp_path / "plan.json")
    assert to_file(again) == to_file(plan)
    assert [rank.share for rank in again.ranks] == [3, 1, 1, 1]


@pytest.mark.parametrize(
    ("devices", "request_", "message"),
    [
        ("cpu0", TENSOR, "groups of two devices or more"),
        ("3xcpu", Request(split_mode="tensor", pipeline_stages=2), r"\(cpu0, cpu1, cpu2\) in 2 stages make none"),
        ("2xcpu", Request(split_mode="layer", pipeline_stages=2), "--pipeline-stages is for --split-mode tensor"),
        ("2xcpu", Request(split_mode="tensor", tensor_split=[1, 2, 3]), "3 shares, and there are 2 devices"),
    ],
)
def test_requests_that_contradict_themselves(decoder: Path, devices: str, request_: Request, message: str) -> None:
    with pytest.raises(MisuseError, match=message):
        plan_model(decoder, [devices], request_)


def test_rank_that_needs_more_than_its_budget_is_named(decoder: Path) -> None:
    with pytest.raises(DoesNotFitError, match=r"rank 1 \(cpu1\) needs .* and may use 50.0 KiB, .* short"):
        plan_model(decoder, ["2xcpu"], Request(split_mode="tensor", memory=["cpu1=50KiB"], tensor_split=[1, 1]))


def test_model_of_which_nothing_can_be_split_is_refused(tmp_path: Path) -> None:
    b = Block()
    x = b.op("LayerNormalization", b.op("Identity", b.data("x", (2, 12), ["n", 12])), b.w("A", 12))
    b.give(b.op("Gather", x, b.ints(3), axis=1), shape=["n", 1])
    save(b.model(), tmp_path / "model.onnx")
    listed = r"\n  A: .*Normal.* needs the axis of 12 whole\n  [^ ]*: it is a single number"
    why = f"can split nothing .*the largest are{listed}"
    with pytest.raises(ModelError, match=why):
        plan_model(tmp_path / "model.onnx", ["2xcpu"], TENSOR)


def test_little_split_is_said(tmp_path: Path) -> None:
    b = Block()
    x = b.op("Softmax", b.data("x", (2, 40), ["n", 40]))
    whole = b.op("Softmax", b.op("MatMul", x, b.w("whole", 40, 40)))
    thin = b.op("MatMul", b.op("Relu", b.op("MatMul", whole, b.w("A", 40, 10))), b.w("B", 10, 40))
    b.give(b.op("Add", whole, thin), shape=["n", 40])
    save(b.model(), tmp_path / "model.onnx")
    plan = plan_model(tmp_path / "model.onnx", ["2xcpu"], TENSOR)
    assert any("33% of the blocks' weights could be split" in warning for warning in plan.warnings)


def test_weights_that_control_flow_reads_are_whole(tmp_path: Path) -> None:
    """They count as weights of blocks, and their reason names the node."""
    text = """
        <ir_version: 8, opset_import: ["" : 17]>
        g (float[n,40] x, bool c) => (float[n,40] y) {
            a = Softmax (x)
            u = MatMul (a, A)
            r = Relu (u)
            b = MatMul (r, B)
            s = Softmax (b)
            y = If (c) <
                then_branch = t () => (float[n,40] p) { p = MatMul (s, W) },
                else_branch = e () => (float[n,40] q) { q = Neg (s) }>
        }"""
    sizes = {"A": (40, 160), "B": (160, 40), "W": (40, 40)}
    weights = [ir.tensor(Block().random(name, *shape), name=name) for name, shape in sizes.items()]
    ir.save(ir.from_onnx_text(text, weights), tmp_path / "model.onnx")
    reports = {weight.name: weight for weight in plan_model(tmp_path / "model.onnx", ["2xcpu"], TENSOR).weights}
    assert reports["A"].split and reports["B"].split and not reports["W"].split
    assert reports["W"].in_block and "(If) reads it in its subgraph" in str(reports["W"].reason)


def test_a_wrong_rule_costs_memory_and_no_result(
    decoder: Path, two_ranks: tuple[Plan, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A product whose rule omits the sum."""
    known = registry.REGISTRY["MatMul"]

    def wrong(op: Operation) -> None:
        assert known.axes is not None
        known.axes(op)
        op.contracted = ()

    right, _ = two_ranks
    monkeypatch.setattr(registry, "REGISTRY", {**registry.REGISTRY, "MatMul": replace(known, axes=wrong)})
    plan = plan_model(decoder, ["2xcpu"], TENSOR)
    assert any(warning.startswith("MatMul stays whole in") for warning in plan.warnings)
    assert 0 < sum(each.split for each in plan.weights) < sum(each.split for each in right.weights)
    assert any("its rule did not hold" in (weight.reason or "") for weight in plan.weights)
    compile_model(plan, tmp_path / "package", verify=False)
    with Session(tmp_path / "package") as session:
        assert_close(session.run(decoder_feeds()), run_whole(decoder, decoder_feeds()), 2e-5)


def test_package_runs_sizes_that_were_not_planned(decoder: Path, three_ranks: Path) -> None:
    with Session(three_ranks) as session:
        for batch, new, past in ((1, 1, 0), (1, 1, 9), (3, 7, 0), (2, 4, 11)):
            feeds = decoder_feeds(batch, new, past)
            assert_close(session.run(feeds), run_whole(decoder, feeds), 2e-5)


def test_linked_weights_are_parts_of_the_models_own_files(decoder: Path, tmp_path: Path) -> None:
    model = shutil.copytree(decoder.parent, tmp_path / "model") / decoder.name
    package = tmp_path / "linked"
    manifest = compile_model(plan_model(model, ["2xcpu"], TENSOR), package, weights="link", verify=False)
    linked = [file for file in manifest.files if file.hash is None]
    assert linked
    feeds = decoder_feeds()
    with Session(package) as session:
        assert_close(session.run(feeds), run_whole(decoder, feeds))


def test_reason_of_a_weight_that_one_of_its_readers_has_whole(tmp_path: Path) -> None:
    """Equal biases of several layers may be one weight, as those of zeros are."""
    b = Block()
    x, bias = b.data("x", (3, 16), ["n", 16]), b.w("bias", 64)
    wide = b.op("Relu", b.op("Add", b.op("MatMul", x, b.w("up", 16, 64)), bias))
    made = b.op("MatMul", wide, b.w("down", 64, 64))
    b.give(b.op("Softmax", b.op("Add", made, bias), axis=-1), shape=["n", 64])
    save(b.model(), tmp_path / "model.onnx")
    reasons = {weight.name: weight.reason for weight in plan_model(tmp_path / "model.onnx", ["2xcpu"], TENSOR).weights}
    assert "(Softmax) needs the axis of 64 whole" in (reasons["bias"] or "")


def test_what_one_node_needs_of_a_weight_is_one_reason(tmp_path: Path) -> None:
    b = Block()
    x = b.data("x", (2, 4, 6), ["n", 4, 6])
    moved = b.op("LayerNormalization", b.op("Add", x, b.w("move", 4, 6)), b.w("scale", 4, 6), axis=1)
    b.give(b.op("MatMul", b.op("Relu", b.op("MatMul", moved, b.w("A", 6, 48))), b.w("B", 48, 6)))
    save(b.model(), tmp_path / "model.onnx")
    reasons = {each.name: each.reason for each in plan_model(tmp_path / "model.onnx", ["2xcpu"], TENSOR).weights}
    assert (reasons["move"] or "").endswith("(LayerNormalization) needs the axes of 4, 6 whole")


def test_explain_shows_axes_and_what_pins_them(decoder: Path) -> None:
    result = CliRunner().invoke(app, ["plan", str(decoder), "-d", "2xcpu", "--split-mode", "tensor", "--explain"])
    assert result.exit_code == 0, result.output
    assert "160" in result.output
    assert "80,80" in result.output
    assert "(SimplifiedLayerNormalization) needs the axis of 64 whole" in result.output
    assert f"{2 * DECODER.layers} collectives" in result.output


def test_without_the_library_there_are_sums_between_engines(
    decoder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("splitc.runtime.engines.operator_library.is_built", lambda: False)
    manifest = compile_model(plan_model(decoder, ["2xcpu"], TENSOR), tmp_path / "package", verify=False)
    for rank in manifest.ranks:
        assert len(rank.engines) == 2 * DECODER.layers + 1
        reduced = [name for step in rank.program if isinstance(step, Reduce) for name in step.wholes]
        assert len(reduced) == manifest.collectives == 2 * DECODER.layers
    with Session(tmp_path / "package") as session:
        found = session.run(decoder_feeds())["logits"]
    np.testing.assert_allclose(found, run_whole(decoder, decoder_feeds())["logits"], rtol=1e-4, atol=1e-5)


def test_measured_memory_of_ranks(two_ranks: tuple[Plan, Path]) -> None:
    found = measured(two_ranks[1], decoder_feeds())
    assert [rank.device for rank in found] == ["cpu0", "cpu1"]
    assert all(np.isfinite(rank.peak) and rank.peak > 0 for rank in found)


@pytest.mark.parametrize("mode", ["tensor", "batch"])
def test_input_without_a_shape_is_named_where_nothing_can_be_split(tmp_path: Path, mode: str) -> None:
    """No axis is known then. With --shapes it is split."""
    b = Block()
    b.give(b.op("MatMul", b.op("Relu", b.op("MatMul", b.data("x", (2, 12)), b.w("A", 12, 48))), b.w("B", 48, 12)))
    model = b.model()
    for value in (*model.graph.inputs, *model.graph.outputs):
        value.shape = None
    ir.save(model, tmp_path / "model.onnx")
    with pytest.raises(CannotSplitError, match=r"the model does not run with the planned sizes.*\(--shapes\).*MatMul"):
        plan_model(tmp_path / "model.onnx", ["2xcpu"], Request(split_mode=mode))
    given = Request(split_mode="tensor", shapes={"x": (2, 12)})
    assert plan_model(tmp_path / "model.onnx", ["2xcpu"], given).weights[0].split


def test_rows_and_heads_in_one_axis_of_an_output_whose_shape_is_not_known(tmp_path: Path) -> None:
    """The ranks' heads are joined for any number of rows."""
    b = Block()
    x = b.data("x", (2, 3, 64), ["rows", 3, 64])
    queries = b.op("Reshape", b.op("MatMul", x, b.w("in", 64, 64)), b.ints(0, 3, 4, 16))
    count = b.op("Sqrt", b.op("Cast", b.op("Mul", b.shape(x, 0), b.shape(x, 0)), to=FLOAT))
    rows = b.op("Cast", count, to=INT)
    three = b.op("Div", b.op("Mul", rows, b.ints(3)), rows)  # the number of axes, which no rule for shapes tells
    sizes = b.op("Slice", b.ints(-1, 3, 16), b.ints(0), three)
    merged = b.op("Tanh", b.op("Reshape", b.op("Transpose", queries, perm=[0, 2, 1, 3]), sizes))
    back = b.op("Transpose", b.op("Reshape", merged, b.ints(-1, 4, 3, 16)), perm=[0, 2, 1, 3])
    b.give(b.op("MatMul", b.op("Reshape", back, b.ints(-1, 3, 64)), b.w("out", 64, 64)))
    b.give(merged, "heads")
    merged.shape = None
    save(b.model(), tmp_path / "model.onnx")
    plan = plan_model(tmp_path / "model.onnx", "2xcpu", Request(split_mode="tensor", shapes={"x": (2, 3, 64)}))
    compile_model(plan, tmp_path / "package", verify=False)
    feeds = {"x": b.random("more", 5, 3, 64)}
    with Session(tmp_path / "package") as session:
        assert_close(session.run(feeds), run_whole(tmp_path / "model.onnx", feeds))


@pytest.mark.parametrize("shares", [(1, 1), (1, 2, 1)])
def test_state_is_sharded_as_its_new_value(shares: Sequence[float], tmp_path: Path) -> None:
    """A rank keeps its shard of it. One state is read by heads, the other one by rows; both are made by columns."""
    b = Block()
    x = softmax(b, b.data("x", (2, 12), ["n", 12]))
    states = {name: b.data(name, (2, 24), ["n", 24]) for name in ("heads", "rows")}
    by_heads = b.op("Transpose", b.op("Reshape", states["heads"], b.ints(0, 4, 6)), perm=[1, 0, 2])
    seen = b.op("ReduceSum", softmax(b, b.op("MatMul", by_heads, b.w("A", 4, 6, 12))), b.ints(0), keepdims=0)
    made = b.op("Tanh", b.op("Add", b.op("MatMul", seen, b.w("B", 12, 24)), b.op("MatMul", x, b.w("C", 12, 24))))
    b.give(made, "new heads", ["n", 24])
    next_ = b.op("Tanh", b.op("Add", b.op("MatMul", states["rows"], b.w("D", 24, 24)), made))
    b.give(next_, "new rows", ["n", 24])
    b.give(b.op("MatMul", next_, b.w("E", 24, 12)), "y", ["n", 12])
    model, package = tmp_path / "m.onnx", tmp_path / "package"
    save(b.model(), model)
    ends = {name: f"new {name}" for name in states}
    plan = plan_model(model, [f"{len(shares)}xcpu"], Request(split_mode="tensor", states=ends, tensor_split=shares))
    compile_model(plan, package, verify=False)
    held = {name: np.zeros((2, 24), np.float32) for name in states}
    with Session(package, verify="never", threads=1) as session, session.start() as sequence:
        for number in range(3):
            feeds = {"x": b.feeds["x"] * (number + 1)}
            expected = run_whole(model, feeds | held)
            assert_close(sequence.run(feeds), {"y": expected["y"]})
            held = {name: expected[end] for name, end in ends.items()}
