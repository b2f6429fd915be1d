"""Row mode from the user's view: plans, messages, refusals, and checks."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import onnx_ir as ir
import pytest
from typer.testing import CliRunner

from models.llama import Size, build
from models.writer import Writer, save
from splitc.compiler import Plan, Request, compile_model, plan_model
from splitc.compiler.errors import CannotSplitError
from splitc.compiler.execution.arena import UNIT
from splitc.compiler.modes.replanning import plan_from_file
from splitc.compiler.planning.plan_file import to_file, write_plan
from splitc.compiler.sharding.products import SlicedProducts
from splitc.runtime import Session
from splitc.runtime.cli.app import app
from splitc.runtime.errors import DoesNotFitError, MisuseError, OutputsDifferError
from splitc.runtime.feeds.fills import make_inputs
from splitc.runtime.package.manifest import Rank
from splitc.runtime.package.manifest_file import read_manifest
from tests.conftest import DECODER, assert_close, decoder_feeds, run_whole
from tests.helpers.blocks import Block, check_rows
from tests.helpers.measured import measured

# Budgets here are those of tiny models.
pytestmark = pytest.mark.usefixtures("bare_engines")

ROW = Request(split_mode="row", row_min=16)


@pytest.fixture(scope="module")
def three_ranks(decoder: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Plan, Path]:
    """A plan and its package."""
    plan = plan_model(decoder, ["3xcpu"], replace(ROW, tensor_split=[1, 1, 1]))
    package = tmp_path_factory.mktemp("three") / "package"
    compile_model(plan, package)
    return plan, package


def test_helpers_hold_slices_and_the_main_device_all_else(decoder: Path, three_ranks: tuple[Plan, Path]) -> None:
    plan, package = three_ranks
    inside = [weight for weight in plan.weights if weight.in_block]
    assert sum(each.split for each in inside) > 0.95 * sum(each.bytes for each in inside)
    manifest = read_manifest(package)
    # q, k and v; o; gate and up; down
    assert manifest.collectives == 4 * DECODER.layers
    main, *helpers = manifest.ranks
    assert len(main.inputs) == 3 + 2 * DECODER.layers + len(manifest.added)
    assert len(main.outputs) == 1 + 2 * DECODER.layers
    assert main.cache_bytes > 0
    sliced, whole = sum(each.split for each in plan.weights), sum(each.bytes for each in plan.weights)
    assert weights_in_file(package, main) == pytest.approx(whole - 2 / 3 * sliced, rel=0.01)
    for helper in helpers:
        assert (helper.inputs, helper.outputs, helper.cache_bytes) == ([], [], 0)
        assert helper.blocks == [f"layers.{number}" for number in range(DECODER.layers)]
        assert [engine.inputs for engine in helper.engines] == [[]]
        assert weights_in_file(package, helper) == pytest.approx(sliced / 3, rel=0.01)
        # Packed columns are in blocks of 16, and a third of 32 or 64 is none.
        assert 1.0 <= helper.weights_bytes / weights_in_file(package, helper) < 1.5
    assert len(manifest.cuts) == 2
    feeds = decoder_feeds()
    with Session(package) as session:
        assert_close(session.run(feeds), run_whole(decoder, feeds))


def weights_in_file(package: Path, rank: Rank) -> int:
    (engine,) = rank.engines
    weights = ir.load(package / engine.path).graph.initializers.values()
    return sum(weight.const_value.nbytes for weight in weights if weight.const_value is not None)


def test_package_runs_sizes_that_were_not_planned(decoder: Path, three_ranks: tuple[Plan, Path]) -> None:
    with Session(three_ranks[1]) as session:
        for batch, new, past in ((1, 1, 0), (1, 1, 9), (3, 7, 0), (2, 4, 11)):
            feeds = decoder_feeds(batch, new, past)
            assert_close(session.run(feeds), run_whole(decoder, feeds), 2e-5)
        feeds = decoder_feeds(4)
        assert_close(session.run(feeds, micro_batch=3), run_whole(decoder, feeds), 2e-5)


def test_main_device_comes_first_with_its_own_share(decoder: Path) -> None:
    request = replace(ROW, main_device="CPU:2", tensor_split=[1, 1, 3], memory=["1GiB", "cpu2=2GiB"])
    plan = plan_model(decoder, ["3xcpu"], request)
    assert [str(rank.device) for rank in plan.ranks] == ["cpu2", "cpu0", "cpu1"]
    assert [rank.share for rank in plan.ranks] == [3, 1, 1]
    assert [rank.budget for rank in plan.ranks] == [2 << 30, 1 << 30, 1 << 30]
    units = next(weight.units for weight in plan.weights if weight.name.endswith("gate_proj.weight"))
    assert units == "96,32,32"


def test_shares_follow_what_budgets_leave(decoder: Path) -> None:
    """The main device also holds the rest of the model: its slices fit the remaining memory."""
    whole = plan_model(decoder, ["2xcpu"], replace(ROW, tensor_split=[1, 1], memory=["1GiB"]))
    rest = sum(each.bytes - each.split for each in whole.weights)
    sliced = sum(each.split for each in whole.weights)
    budget = rest + sliced // 4 + (100 << 10)
    plan = plan_model(decoder, ["2xcpu"], replace(ROW, memory=[f"cpu0={budget}", "cpu1=4MiB"]))
    main, helper = plan.ranks
    assert main.budget is not None
    assert main.memory.total <= main.budget
    assert helper.memory.weights > 0.7 * sliced


def test_small_helper_takes_a_small_slice(decoder: Path, tmp_path: Path) -> None:
    plan = plan_model(decoder, ["2xcpu"], replace(ROW, memory=["1GiB", "cpu1=112KiB"], tensor_split=[50, 1]))
    assert plan.ranks[1].memory.total <= 112 << 10
    compile_model(plan, tmp_path / "package", verify=False)
    feeds = decoder_feeds()
    with Session(tmp_path / "package") as session:
        assert_close(session.run(feeds), run_whole(decoder, feeds))


def test_rank_that_needs_more_than_its_budget_is_named(decoder: Path) -> None:
    request = replace(ROW, memory=["1GiB", "cpu0=100KiB"])
    with pytest.raises(DoesNotFitError, match=r"rank 0 \(cpu0\) needs .* may use 100 KiB, .* short; .* on the main de"):
        plan_model(decoder, ["2xcpu"], request)
    with pytest.raises(DoesNotFitError, match=r"rank 1 \(cpu1\) needs .* may use 100 KiB, .* short"):
        plan_model(decoder, ["2xcpu"], replace(ROW, memory=["1GiB", "cpu1=100KiB"], tensor_split=[1, 1]))


def test_helper_that_gets_nothing_is_refused_or_left_out(decoder: Path) -> None:
    request = replace(ROW, memory=["4GiB", "cpu1=1KiB"])
    with pytest.raises(CannotSplitError, match=r"leaves nothing for rank 1 \(cpu1\): its share is 0.00%"):
        plan_model(decoder, ["2xcpu"], request)
    plan = plan_model(decoder, ["2xcpu"], replace(request, fallback="layer"))
    assert plan.split_mode == "layer"
    assert plan.warnings[0].startswith("split by layer instead: row mode leaves nothing for rank 1")


def convolutions(path: Path) -> Path:
    b = Block()
    x = b.data("x", (1, 8, 9, 9), ["n", 8, 9, 9])
    for layer in range(4):
        x = b.op("Relu", b.op("Conv", x, b.w(f"kernel{layer}", 8, 8, 3, 3), pads=[1, 1, 1, 1]))
    b.give(x, shape=["n", 8, 9, 9])
    save(b.model(), path)
    return path


def test_convolutional_model_is_refused_or_split_by_layer(tmp_path: Path) -> None:
    model = convolutions(tmp_path / "model.onnx")
    with pytest.raises(
        CannotSplitError,
        match=r"can slice nothing (.|\n)*kernel0 .*\(Conv\), which is not a matmul, reads it(.|\n)* read by Conv",
    ):
        plan_model(model, ["2xcpu"], ROW)
    plan = plan_model(model, ["2xcpu"], Request(split_mode="row", fallback="layer", spread=True))
    assert (plan.split_mode, len(plan.ranks)) == ("layer", 2)
    assert "split by layer instead: row mode can slice nothing" in plan.warnings[0]


def test_recurrent_model_is_refused(tmp_path: Path) -> None:
    b = Block()
    x = b.data("x", (7, 2, 32), ["t", "n", 32])
    for layer in range(3):
        y, _, _ = b.ops(
            "LSTM", x, b.w(f"W{layer}", 1, 128, 32), b.w(f"R{layer}", 1, 128, 32), outputs=3, hidden_size=32
        )
        x = b.op("Squeeze", y, b.ints(1))
    b.give(x)
    save(b.model(), tmp_path / "model.onnx")
    with pytest.raises(CannotSplitError, match=r"Its weights: 100% read by LSTM. Use --split-mode layer"):
        plan_model(tmp_path / "model.onnx", ["2xcpu"], ROW)


def test_matrix_that_no_weight_makes_is_no_product(tmp_path: Path) -> None:
    b = Block()
    x = b.data("x", (2, 32), ["n", 32])
    for layer in range(3):
        filled = b.op("ConstantOfShape", b.ints(32, 32), value=ir.tensor([0.01], ir.DataType.FLOAT))
        x = b.op("Relu", b.op("MatMul", b.op("MatMul", x, filled), b.w(f"W{layer}", 32, 32)))
    b.give(x, shape=["n", 32])
    check_rows(b, tmp_path, ["W0", "W1"], rounds=2)


@pytest.mark.parametrize("is_slower", [False, True])
def test_tensor_mode_falls_back_too(is_slower: bool, tmp_path: Path) -> None:
    """Where it can split nothing, and where a collective would take longer than it saves."""
    b = Block()
    x = b.op("Softmax", b.data("x", (2, 12), ["n", 12]))
    x = b.op("MatMul", x, b.w("A", 12, 12) if is_slower else b.op("Softmax", b.data("z", (12, 12), [12, 12])))
    b.give(b.op("Softmax", x), shape=["n", 12])
    save(b.model(), tmp_path / "model.onnx")
    plan = plan_model(tmp_path / "model.onnx", ["2xcpu"], Request(split_mode="tensor", fallback="layer"))
    assert plan.split_mode == "layer"
    assert ("only with collectives that take longer" if is_slower else "can split nothing") in plan.warnings[0]


def test_small_and_outer_weights_stay_on_the_main_device_and_are_listed(tmp_path: Path) -> None:
    size = Size(layers=2, hidden=256, heads=4, kv_heads=2, feed_forward=512, vocabulary=300)
    save(build(size), tmp_path / "model.onnx")
    plan = plan_model(tmp_path / "model.onnx", ["2xcpu"], Request(split_mode="row", tensor_split=[1, 1]))
    listed = to_file(plan).weights
    assert (listed["model.layers.0.self_attn.q_proj.weight"].split, listed["lm_head.weight"].ranks) == ("128,128", [0])
    assert listed["model.layers.0.self_attn.q_proj.weight"].ranks == [0, 1]
    compile_model(plan, tmp_path / "package")
    reasons = {each.name: each.reason for each in read_manifest(tmp_path / "package").unsplit}
    assert "multiplies by 256 x 128, and --row-min is 256" in reasons["model.layers.0.self_attn.k_proj.weight"]
    assert "(Gather), which is not a matmul, reads it" in reasons["model.embed_tokens.weight"]
    assert "(MatMul) is outside the blocks" in reasons["lm_head.weight"]
    assert "model.layers.0.self_attn.q_proj.weight" not in reasons


def test_expert_stacks_are_no_matrices(tmp_path: Path) -> None:
    save(
        build(Size(layers=2, hidden=64, heads=4, kv_heads=4, feed_forward=96, vocabulary=64, experts=4)), tmp_path / "m"
    )
    plan = plan_model(tmp_path / "m", ["2xcpu"], ROW)
    reasons = {each.name: each.reason or "" for each in plan.weights}
    assert "multiplies by 4 x 64 x 96, which is not a matrix" in reasons["model.layers.0.mlp.experts.up_proj"]
    assert any("of the blocks' weights could be split" in each and "on the main" in each for each in plan.warnings)


@pytest.mark.parametrize(
    ("devices", "request_", "message"),
    [
        ("cpu0", ROW, "row mode needs two devices or more"),
        ("2xcpu", replace(ROW, main_device="cpu7"), "--main-device names 'cpu7', and the devices are cpu0, cpu1"),
        ("2xcpu", Request(main_device="cpu1"), "--main-device is for --split-mode row"),
        ("2xcpu", Request(split_mode="tensor", row_min=64), "--row-min is for --split-mode row"),
        ("2xcpu", replace(ROW, fallback="diagonal"), "unknown fallback 'diagonal': there is layer"),
        ("2xcpu", replace(ROW, pipeline_stages=2), "--pipeline-stages is for --split-mode tensor"),
        ("2xcpu", replace(ROW, tensor_split=[1, 2, 3]), "3 shares, and there are 2 devices"),
    ],
)
def test_requests_that_contradict_themselves(decoder: Path, devices: str, request_: Request, message: str) -> None:
    with pytest.raises(MisuseError, match=message):
        plan_model(decoder, [devices], request_)


def test_plan_file_comes_back_as_it_was(decoder: Path, tmp_path: Path) -> None:
    plan = plan_model(decoder, ["3xcpu"], replace(ROW, tensor_split=[1, 3, 2], main_device="cpu1"))
    write_plan(plan, tmp_path / "plan.json")
    again = plan_from_file(decoder, tmp_path / "plan.json")
    assert to_file(again) == to_file(plan)
    assert [str(rank.device) for rank in again.ranks] == ["cpu1", "cpu0", "cpu2"]
    for name, each in (("a", plan), ("b", again)):
        compile_model(each, tmp_path / name, verify=False)
    for file in (path for path in (tmp_path / "a").rglob("*") if path.is_file()):
        assert file.read_bytes() == (tmp_path / "b" / file.relative_to(tmp_path / "a")).read_bytes()


def test_shares_are_edited_in_the_plan(decoder: Path, tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    write_plan(plan_model(decoder, ["2xcpu"], ROW), path)
    content = json.loads(path.read_text())
    assert set(content["blocks"].values()) == {0}
    content["ranks"][0]["share"], content["ranks"][1]["share"] = 0, 1
    path.write_text(json.dumps(content))
    plan = plan_from_file(decoder, path)
    assert next(each.units for each in plan.weights if each.name.endswith("gate_proj.weight")) == "0,160"
    compile_model(plan, tmp_path / "package", verify=False)
    feeds = decoder_feeds()
    with Session(tmp_path / "package") as session:
        assert_close(session.run(feeds), run_whole(decoder, feeds))
    content["ranks"][1]["share"] = 0
    path.write_text(json.dumps(content))
    with pytest.raises(MisuseError, match=r"the line \"share: 0.0\" of rank 1 \(cpu1\): remove the rank"):
        plan_from_file(decoder, path)
    content["ranks"][1].update(share=1, budget_bytes=1000)
    path.write_text(json.dumps(content))
    with pytest.raises(DoesNotFitError, match=r"rank 1 \(cpu1\) needs"):
        plan_from_file(decoder, path)


def test_wrong_order_is_found_before_anything_is_written(
    decoder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = plan_model(decoder, ["2xcpu"], replace(ROW, tensor_split=[1, 1]))
    monkeypatch.setattr(SlicedProducts, "ranks", lambda *_: [1, 0])
    with pytest.raises(OutputsDifferError, match=r"outputs of the split model differ .* Nothing was written"):
        compile_model(plan, tmp_path / "package")
    assert not (tmp_path / "package").exists()


def test_linked_weights_are_parts_of_the_models_own_files(tmp_path: Path) -> None:
    b = Block()
    x = b.op("Softmax", b.data("x", (20, 64), ["n", 64]))
    for layer in range(3):
        x = b.op("Relu", b.op("Gemm", x, b.w(f"A{layer}", 64, 64), transB=1))
    b.give(x, shape=["n", 64])
    save(b.model(), tmp_path / "model.onnx")
    plan = plan_model(tmp_path / "model.onnx", ["2xcpu"], ROW)
    manifest = compile_model(plan, tmp_path / "linked", weights="link", verify=False)
    assert {file.path for file in manifest.files if file.hash is None} == {
        "rank0/source0.weights",
        "rank1/source0.weights",
    }
    with Session(tmp_path / "linked") as session:
        assert_close(session.run(b.feeds), run_whole(tmp_path / "model.onnx", b.feeds))


def test_measured_memory_is_as_predicted(tmp_path: Path) -> None:
    """Also of ranks that wait for each other."""
    save(build(Size(layers=2, hidden=768, heads=8, kv_heads=8, feed_forward=2048, vocabulary=1000)), tmp_path / "model")
    request = Request(split_mode="row", shapes={"input_ids": (1, 16)}, tensor_split=[1, 1])
    compile_model(plan_model(tmp_path / "model", ["2xcpu"], request), tmp_path / "package", verify=False)
    feeds = make_inputs(read_manifest(tmp_path / "package").inputs)
    for rank in measured(tmp_path / "package", feeds):
        assert abs(rank.loaded - rank.predicted_weights) < 32 << 20
        assert abs(rank.peak - rank.predicted_total) < 32 << 20


def test_columns_of_what_is_there_early_wait_for_their_round(tmp_path: Path) -> None:
    """ONNX Runtime multiplies an encoder's output by all layers' weights at once; the columns then wait in memory."""
    w = Writer()
    encoded = w.input("encoded", ir.DataType.FLOAT, [256, 32])
    hidden = w.input("hidden", ir.DataType.FLOAT, [1, 32])
    for layer in range(4):
        keys, queries = (w.weight(f"{name}{layer}", ir.tensor(np.ones((32, 32), np.float32))) for name in "kq")
        scores = w.op("MatMul", w.op("MatMul", hidden, queries), w.op("Transpose", w.op("MatMul", encoded, keys)))
        hidden = w.op("Add", hidden, w.op("MatMul", w.op("Softmax", scores), encoded))
    w.output(hidden, "y", ir.DataType.FLOAT, [1, 32])
    save(w.model(), tmp_path / "model.onnx")
    _, helper = plan_model(tmp_path / "model.onnx", ["2xcpu"], replace(ROW, tensor_split=[1, 1])).ranks
    layers = helper.memory.weights // (2 * 32 * 16 * 4)
    assert layers >= 3
    assert helper.memory.activations >= 256 * 32 * 4 + layers * 256 * 16 * 4


def test_halves_are_cast_on_helpers(tmp_path: Path) -> None:
    """Inputs of 32 KiB to singles of 64, which are there together. Columns of 32 KiB take the place of the first.

    As halves they are in the place of the second. Two tokens lie beside, and 32 KiB are noted of the region.
    """
    w = Writer(17)
    weights = [w.weight(f"w{number}", ir.tensor(np.ones((256, 256), np.float16))) for number in range(4)]
    hidden = w.input("x", ir.DataType.FLOAT16, [64, 256])
    for weight in weights:
        hidden = w.op("Relu", w.op("MatMul", hidden, weight))
    w.output(hidden, "y", ir.DataType.FLOAT16, [64, 256])
    save(w.model(), tmp_path / "model.onnx")
    _, helper = plan_model(tmp_path / "model.onnx", ["2xcpu"], replace(ROW, tensor_split=[1, 1])).ranks
    assert helper.memory.activations == 2 * UNIT + ((32 + 64 + 32) << 10)


def test_commands_know_row_mode(decoder: Path, tmp_path: Path) -> None:
    def splitc(*arguments: object) -> str:
        result = CliRunner().invoke(app, [str(each) for each in arguments])
        assert result.exit_code == 0, result.output
        return result.output

    package = tmp_path / "package"
    options = ["-d", "3xcpu", "--split-mode", "row", "--row-min", "16"]
    options += ["--main-device", "cpu1", "--tensor-split", "1,2,1"]
    shown = splitc("plan", decoder, *options)
    assert f"{4 * DECODER.layers} round trips" in shown
    assert "0 cpu1" in shown
    assert "cut 0-2" in shown
    assert "whole on the main device" in shown
    splitc("compile", decoder, "-o", package, *options)
    assert "5 of 5 outputs agree" in splitc("check", package, "--model", decoder, "--no-memory")
    timed = splitc("bench", package, "--runs", 2, "--no-memory")
    assert "the main rank works, and the others multiply with it" in timed
    shown = splitc("inspect", package)
    assert "round trips a run" in shown
    assert "each rank is one engine, with its collectives inside" in shown
    facts = json.loads(splitc("inspect", package, "--json"))
    assert facts["split_mode"] == "row"
    assert len(facts["cut_bytes"]) == 2


def test_many_requests_in_flight_keep_their_own_answers(decoder: Path, three_ranks: tuple[Plan, Path]) -> None:
    feeds = [decoder_feeds(1 + n % 3, 1 + n % 4, n % 5) for n in range(12)]
    with Session(three_ranks[1], threads=1, in_flight=4) as session:
        for each, outputs in zip(feeds, session.map(feeds)):
            assert_close(outputs, run_whole(decoder, each), 2e-5)
