"""Tensor mode with placed weights: ranks with shards, and one more rank that holds the placed weights whole."""

from __future__ import annotations

from pathlib import Path

import pytest

from models.writer import save
from splitc.compiler import Plan, Request, compile_model, plan_model
from splitc.compiler.analysis.stages import Stage
from splitc.compiler.modes.auto import predict
from splitc.compiler.modes.replanning import plan_from_file
from splitc.compiler.packaging import block_check
from splitc.compiler.packaging.block_check import BlockInputs
from splitc.compiler.packaging.joined_graph import JoinedGraph
from splitc.compiler.planning.plan_file import to_file, write_plan
from splitc.compiler.request.places import ExpertsPlace, Place
from splitc.runtime import Session
from splitc.runtime.errors import DoesNotFitError, MisuseError
from splitc.runtime.hardware.machine import Machine
from splitc.runtime.package.manifest_file import read_manifest
from splitc.runtime.package.steps import Receive, Reduce, Run, Send
from splitc.runtime.tools.compare import Difference
from tests.conftest import assert_close, run_whole
from tests.helpers.blocks import Block
from tests.helpers.command import splitc
from tests.helpers.measured import measured
from tests.helpers.mixtures import FORMS, WIDE, Mixtures, Sizes, mixture_feeds
from tests.helpers.needs import need_experts
from tests.helpers.placed import assert_failures_are_alone, assert_layer_has_its_cache, assert_same

EXPERTS = ExpertsPlace("cpu2")
# Lengths and rows of requests, of which one is more than what a channel has room for.
SIZES = ((5, 1), (50, 100), (1, 2))


def make_plan(model: Path, devices: str = "3xcpu", **asked: object) -> Plan:
    return plan_model(model, devices, Request(**{"split_mode": "tensor", "memory": ["1GiB"], **asked}))  # type: ignore[arg-type]


@pytest.mark.parametrize("form", FORMS)
def test_experts_beside_shards(tmp_path: Path, mixtures: Mixtures, form: str) -> None:
    """Attention and the shared expert are sharded. The first rank sends tokens; all ranks receive the results."""
    model = mixtures(form)
    plan = make_plan(model, experts=EXPERTS, shapes={"ids": (1, 5)})
    assert [(str(rank.device), rank.part) for rank in plan.ranks] == [("cpu0", 0), ("cpu1", 1), ("cpu2", 2)]
    assert all(cut.detour and cut.bytes == 4 * 5 * WIDE * 4 for cut in plan.cuts)
    need_experts(form)
    split = {weight.name for weight in plan.weights if weight.split}
    assert split >= {f"layers.{layer}.{part}" for layer in (0, 1) for part in ("up", "down", "attention.v")}
    assert not any(".mixture." in weight.name and ".router" not in weight.name for weight in plan.weights)
    assert_same(model, plan, tmp_path / "package", SIZES)


def test_rows_of_a_batch_stay_independent(decoder: Path, tmp_path: Path) -> None:
    plan = make_plan(decoder, place=[Place("embed", "cpu2")])
    compile_model(plan, tmp_path / "package", verify=False)
    batch = read_manifest(tmp_path / "package").batch
    assert batch is not None and batch["input_ids"] == batch["logits"] == 0


def test_more_ranks_and_places(tmp_path: Path, mixtures: Mixtures) -> None:
    """Three ranks with uneven shards, and two with placed weights, one of which is named before them."""
    model = mixtures("dense")
    places = [Place("^table$", "cpu0"), Place("head", "cpu0")]
    plan = make_plan(model, "5xcpu", experts=ExpertsPlace("cpu4"), place=places, tensor_split=[5, 1, 2, 1, 1])
    assert sorted(map(str, (rank.device for rank in plan.ranks[3:]))) == ["cpu0", "cpu4"]
    assert_same(model, plan, tmp_path / "package", SIZES)


def test_ranks_in_processes(tmp_path: Path, mixtures: Mixtures) -> None:
    model = mixtures("stacked")
    assert_same(model, make_plan(model, experts=EXPERTS), tmp_path / "package", SIZES, "processes")


def test_groups_of_shards_with_places(tmp_path: Path, mixtures: Mixtures) -> None:
    """Two copies of the model, each with two ranks with shards and one for the experts."""
    model = mixtures("gathered")
    plan = make_plan(model, "6xcpu", experts=EXPERTS, batch_groups=2, shapes={"ids": (4, 5)})
    assert [rank.replica for rank in plan.ranks] == [0, 0, 0, 1, 1, 1]
    assert_same(model, plan, tmp_path / "package", SIZES)


def test_table_is_read_before_and_comes_as_a_step(tmp_path: Path, mixtures: Mixtures) -> None:
    """Nothing goes back to it, so that in a stream it runs ahead of the ranks with shards."""
    model = mixtures("fused")
    plan = make_plan(model, place=[Place("^table$", "cpu2")])
    assert_same(model, plan, tmp_path / "package", SIZES)
    programs = [rank.program for rank in read_manifest(tmp_path / "package").ranks]
    assert [type(step) for step in programs[2]] == [Run, Send, Send]
    assert [isinstance(program[0], Receive) for program in programs] == [True, True, False]
    assert not any(isinstance(step, Send) for program in programs[:2] for step in program)


def test_sums_and_transfers_have_one_order(mixtures: Mixtures) -> None:
    """A rank that does not read a received value, since another adds it to a sum, receives it in the same order."""
    model = mixtures("dense", 3)
    plan = make_plan(model, "4xcpu", experts=ExpertsPlace("cpu3"))

    def exchanges(number: int) -> list[object]:
        steps = plan.program(number).steps
        return [
            step.wholes if isinstance(step, Reduce) else step.value
            for step in steps
            if isinstance(step, Reduce | Receive)
        ]

    assert exchanges(0) == exchanges(1) == exchanges(2)
    assert sum(isinstance(step, str) for step in exchanges(0)) == 3


def test_state_of_a_placed_layer_stays_with_it(deep_decoder: Path, tmp_path: Path) -> None:
    """Its cache is whole on the other device; the other layers' caches are shards."""
    plan = make_plan(deep_decoder, place=[Place(r"layers\.2\.", "cpu2")])
    assert_layer_has_its_cache(deep_decoder, plan, 2, tmp_path / "package")


def test_placed_weight_that_exchanges_nothing(tmp_path: Path) -> None:
    """Its rank takes an input of the model and returns an output, without any transfer."""
    b = Block()
    x = b.data("x", (2, 5, WIDE), ["n", "t", WIDE])
    up, down = b.w("up", WIDE, 64), b.w("down", 64, WIDE)
    b.give(b.op("Softmax", b.op("MatMul", b.op("Tanh", b.op("MatMul", b.op("Softmax", x), up)), down)), "y")
    b.give(b.op("Tanh", b.op("MatMul", x, b.w("own", WIDE, WIDE))), "z")
    save(b.model(), tmp_path / "model.onnx")
    plan = make_plan(tmp_path / "model.onnx", place=[Place("own", "cpu2")])
    compile_model(plan, tmp_path / "package", verify=False)
    with Session(tmp_path / "package", threads=1) as session:
        assert_close(session.run(b.feeds), run_whole(tmp_path / "model.onnx", b.feeds))


def test_plan_is_read_back(tmp_path: Path, mixtures: Mixtures) -> None:
    model = mixtures("fused")
    plan = make_plan(model, "4xcpu", experts=EXPERTS, tensor_split=[1, 2, 9, 1])
    assert [str(rank.device) for rank in plan.ranks] == ["cpu0", "cpu1", "cpu3", "cpu2"]
    path = tmp_path / "plan.json"
    write_plan(plan, path)
    assert to_file(plan_from_file(model, path)) == to_file(plan)
    text = path.read_text()
    path.write_text(text.replace('.first": "cpu2"', '.first": "cpu1"').replace('.second": "cpu2"', '.second": "cpu1"'))
    with pytest.raises(MisuseError, match="placed weights on ranks before those with blocks"):
        plan_from_file(model, path)


def test_memory_and_time_are_those_of_both(mixtures: Mixtures, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks with shards hold no experts. A request takes the time of both and of the transfers."""
    monkeypatch.setattr("splitc.compiler.planning.clock.cores", lambda: 8)  # enough that a stream holds nobody up
    model = mixtures("stacked")
    plan, plain = make_plan(model, experts=EXPERTS), make_plan(model, "2xcpu")
    experts = sum(
        weight.bytes for weight in plain.weights if ".mixture." in weight.name and ".router" not in weight.name
    )
    assert plan.ranks[2].memory.weights >= experts
    assert all(own.memory.weights <= other.memory.weights for own, other in zip(plan.ranks, plain.ranks, strict=False))
    machine = Machine()
    assert predict(plan, machine, 1).latency > predict(plan, machine, 1).interval * 0.99 > 0
    with pytest.raises(DoesNotFitError, match=r"rank 2 \(cpu2\) needs .* and may use 50.0 KiB"):
        make_plan(model, experts=EXPERTS, memory=["1GiB", "cpu2=50KiB"])


def test_measured_peaks_are_those_predicted(tmp_path: Path, mixtures: Mixtures) -> None:
    """Also for ranks with many small engines between collectives and transfers."""
    model = mixtures("stacked", 2, Sizes(rows=8000, wide=512, inner=1024, experts=8))
    plan = make_plan(model, experts=EXPERTS, shapes={"ids": (1, 64)})
    compile_model(plan, tmp_path / "package", verify=False)
    for rank in measured(tmp_path / "package", mixture_feeds(64)):
        assert -2 << 20 < rank.predicted_total - rank.peak < 24 << 20


@pytest.mark.parametrize("ranks", ["threads", "processes"])
def test_request_that_fails_fails_alone(tmp_path: Path, mixtures: Mixtures, ranks: str) -> None:
    model = mixtures("loop")
    compile_model(make_plan(model, experts=EXPERTS), tmp_path / "package", verify=False)
    with Session(tmp_path / "package", threads=1, in_flight=3, ranks=ranks) as session:
        assert_failures_are_alone(session, model, 6)
        given = [mixture_feeds(length, rows) for length, rows in SIZES]
        for feeds, outputs in zip(given, session.map(given), strict=True):
            assert_close(outputs, run_whole(model, feeds), 2e-5)


def test_what_is_shown_names_the_rank(mixtures: Mixtures) -> None:
    model = mixtures("fused")
    asked = ("-d", "3xcpu", "--split-mode", "tensor", "--experts", "cpu2", "--memory", "1GiB")
    said = splitc("plan", model, *asked, "--explain").stdout
    assert "detour to rank 2: " in said and "placed on cpu2: " in said


def test_one_stage_beside_what_is_placed(mixtures: Mixtures) -> None:
    model = mixtures("fused", 4)
    with pytest.raises(
        MisuseError, match="--pipeline-stages is 2, and tensor mode places weights beside a single stage"
    ):
        make_plan(model, "5xcpu", experts=ExpertsPlace("cpu4"), pipeline_stages=2)
    with pytest.raises(
        MisuseError,
        match=r"groups of two devices or more, all of one size: 1 device for blocks \(cpu0\) in 1 stage makes none",
    ):
        make_plan(model, "2xcpu", experts=ExpertsPlace("cpu1"))


def test_blocks_are_compared_where_the_whole_is_too_large(
    tmp_path: Path, mixtures: Mixtures, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Including the part of a block on the additional rank."""
    monkeypatch.setattr("splitc.compiler.packaging.self_check.LARGEST", 1 << 18)
    said: list[str] = []
    plan = make_plan(mixtures("dense", 2, Sizes(rows=3000)), experts=EXPERTS)
    compared: list[str] = []
    compare_block = block_check._compare_block

    def watched(plan: Plan, joined: JoinedGraph, inputs: BlockInputs, stage: Stage) -> list[Difference]:
        compared.append(stage.blocks[0].kind)
        return compare_block(plan, joined, inputs, stage)

    monkeypatch.setattr(block_check, "_compare_block", watched)
    compile_model(plan, tmp_path / "package", say=said.append)
    assert {"placed", "block"} <= set(compared)
    assert any("of each form, agree with the model's own" in each for each in said)
