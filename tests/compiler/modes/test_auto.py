"""Auto mode: what it compares, what it chooses and why, and its message if nothing fits."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import onnx_ir as ir
import pytest

from models.llama import Size, build
from models.writer import save
from splitc.compiler import Request, compile_model, plan_model
from splitc.compiler.modes.auto import choose, predict
from splitc.compiler.modes.replanning import plan_from_file
from splitc.compiler.planning.clock import Prediction
from splitc.compiler.planning.plan import Alternative, Plan
from splitc.compiler.planning.plan_file import write_plan
from splitc.compiler.show.plan_tables import print_plan
from splitc.runtime import Session
from splitc.runtime.errors import DoesNotFitError, MisuseError
from splitc.runtime.hardware.machine import Machine
from splitc.runtime.hardware.profiles import HOPPER, Link
from splitc.runtime.units import format_seconds
from tests.conftest import assert_close, decoder_feeds, run_whole
from tests.helpers.command import splitc

# Budgets here are those of tiny models.
pytestmark = [pytest.mark.usefixtures("bare_engines"), pytest.mark.kept_analyses]

# Links that cost nothing, and links on which nothing is worth sending.
FREE, SLOW = Link(0.0, 0.0), Link(10.0, 0.0)


@pytest.fixture(autouse=True)
def two_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    """A fixed number of cores on every machine."""
    monkeypatch.setattr("splitc.compiler.planning.clock.cache_bytes", lambda: 0)
    monkeypatch.setattr("splitc.compiler.planning.clock.cores", lambda: 2)
    monkeypatch.setattr("splitc.runtime.hardware.devices.cores", lambda: 2)
    set_machine(monkeypatch, FREE)


def set_machine(monkeypatch: pytest.MonkeyPatch, link: Link) -> None:
    machine = Machine({"cpu-cpu": link}, {"cpu-cpu": link})
    monkeypatch.setattr("splitc.compiler.modes.choosing.known_machine", lambda: machine)


def names(plan: Plan, possible: bool = True) -> list[str]:
    return [each.name for each in plan.alternatives if (each.refused is None) == possible]


def test_plans_of_every_mode_say_how_long_requests_take(decoder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    compared = {each.name: each for each in plan_model(decoder, ["2xcpu"]).alternatives}
    for mode in ("layer", "tensor", "batch"):
        plan = plan_model(decoder, ["2xcpu"], Request(split_mode=mode, spread=True))
        alternative = compared[f"{mode} on 2"]
        assert plan.prediction == Prediction(alternative.latency, alternative.interval)
        print_plan(plan)
        one, stream = format_seconds(alternative.latency), format_seconds(alternative.interval)
        assert f"time: a request {one}, in a stream one every {stream}; estimated" in capsys.readouterr().out


def test_all_ways_are_compared(decoder: Path) -> None:
    plan = plan_model(decoder, ["4xcpu"], Request(memory=["1GiB"]))
    every = [each.name for each in plan.alternatives]
    assert every == [
        "one device",
        *(f"layer on {count}" for count in (2, 3, 4)),
        "batch on 2",
        "layer on 2 groups of 2",
        "batch on 3",
        "batch on 4",
        *(f"{mode} on {count}" for count in (2, 3, 4) for mode in ("tensor", "row")),
        *(f"{mode} on 2 groups of 2" for mode in ("tensor", "row")),
        "tensor on 4 in 2 stages",
    ]
    sliced = ["row on 2", "row on 3", "row on 4", "row on 2 groups of 2"]
    assert names(plan, possible=False) == sliced, "its matrices are too small to slice"
    assert all("row mode can slice nothing" in str(each.refused) for each in plan.alternatives if each.refused)
    assert plan.choice is not None
    chosen = next(each for each in plan.alternatives if plan.choice.startswith(f"{each.name}:"))
    assert len(plan.ranks) == chosen.devices
    assert list(chosen.peaks) == [rank.memory.total for rank in plan.ranks]


def test_streams_go_through_copies_or_stages_and_one_request_through_one_device(deep_decoder: Path) -> None:
    """Copies are a little faster, and stages hold half as much."""
    assert plan_model(deep_decoder, ["2xcpu"], Request(memory=["1GiB"])).split_mode == "batch"
    assert plan_model(deep_decoder, ["2xcpu"], Request(memory=["600KiB"])).split_mode == "layer"
    assert len(plan_model(deep_decoder, ["2xcpu"], Request(objective="latency", memory=["1GiB"])).ranks) == 1


@pytest.mark.parametrize(("link", "mode", "ranks"), [(FREE, "tensor", 2), (SLOW, "layer", 1)])
def test_speed_of_links_decides_the_mode(
    tmp_path: Path, link: Link, mode: str, ranks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a thread each, two devices are faster than one if communication costs nothing."""
    size = Size(layers=2, hidden=256, heads=8, kv_heads=4, feed_forward=512, vocabulary=96)
    save(build(size), tmp_path / "model.onnx")
    set_machine(monkeypatch, link)
    request = Request(objective="latency", threads=1, memory=["1GiB"], shapes={"input_ids": (1, 512)})
    plan = plan_model(tmp_path / "model.onnx", ["2xcpu"], request)
    assert (plan.split_mode, len(plan.ranks)) == (mode, ranks)


def test_what_does_not_fit_is_not_chosen(decoder: Path, tmp_path: Path) -> None:
    whole = plan_model(decoder, ["cpu0"], Request(memory=["1GiB"])).ranks[0].memory.total
    request = Request(objective="latency", memory=[str(int(whole * 0.7))])
    plan = plan_model(decoder, ["2xcpu"], request)
    (single,) = [each for each in plan.alternatives if each.devices == 1]
    assert "short" in str(single.refused)
    assert len(plan.ranks) == 2
    compile_model(plan, tmp_path / "package", verify=False)
    with Session(tmp_path / "package") as session:
        assert_close(session.run(decoder_feeds()), run_whole(decoder, decoder_feeds()))


def test_fewer_devices_are_those_with_most_memory(decoder: Path) -> None:
    plan = plan_model(decoder, ["3xcpu"], Request(objective="latency", memory=["1GiB", "cpu1=2GiB"]))
    assert [str(rank.device) for rank in plan.ranks] == ["cpu1"]


def test_shares_are_for_all_devices(decoder: Path) -> None:
    plan = plan_model(decoder, ["2xcpu"], Request(tensor_split=[3, 1], memory=["1GiB"]))
    assert {each.devices for each in plan.alternatives} == {2}


def test_nearest_misses_are_named(decoder: Path) -> None:
    with pytest.raises(DoesNotFitError) as caught:
        plan_model(decoder, ["2xcpu"], Request(memory=["20KiB"]))
    text = str(caught.value)
    assert "does not fit these devices in any mode" in text
    for name in ("layer on 2: the model needs", "tensor on 2: rank", "row on 2: row mode can slice nothing"):
        assert name in text
    result = splitc("compile", decoder, "-o", "none", "-d", "2xcpu", "--memory", "20KiB", code=3)
    assert "in any mode" in result.stderr


def test_among_about_as_fast_ones_room_decides() -> None:
    fast = Alternative("a", "layer", 1, 1.0, 1.0, 0.9)
    roomy = Alternative("b", "layer", 2, 1.5, 1.05, 0.4)
    slow = Alternative("c", "tensor", 2, 0.9, 2.0, 0.1)
    impossible = Alternative("d", "row", 2, refused="too small")
    everyone = [fast, roomy, slow, impossible]
    assert choose(everyone, "throughput") == roomy
    assert choose(everyone, "latency") == slow


def test_little_room_is_not_worth_another_device() -> None:
    one = Alternative("a", "layer", 1, 1.0, 1.0, 0.100)
    two = Alternative("b", "layer", 2, 1.0, 0.99, 0.099)
    assert choose([one, two], "throughput") == one


@pytest.mark.parametrize("is_built", [True, False])
def test_many_engines_on_a_gpu_are_counted(decoder: Path, is_built: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each further ONNX Runtime session of a rank, and NCCL, take memory on a GPU; on a CPU device they share it."""
    monkeypatch.setattr("splitc.runtime.engines.operator_library.is_built", lambda: is_built)
    nccl, second, library = HOPPER.communicator_bytes, HOPPER.engine_bytes, HOPPER.library_bytes

    def plan(device: str, mode: str) -> Plan:
        request = Request(split_mode=mode, engine="onnxruntime", memory=["4GiB"], row_min=16 if mode == "row" else 256)
        return plan_model(decoder, [device], request)

    def engines(plan: Plan) -> list[int]:
        return [rank.memory.engines - library * (rank.device.kind == "cuda") for rank in plan.ranks]

    if is_built:  # elsewhere it is the same without
        assert engines(plan("2xcpu", "tensor")) == [0, 0]
        assert engines(plan("cuda0", "layer")) == [second]
        assert engines(plan("2xcuda", "layer")) == [nccl + second] * 2
        assert engines(plan("3xcuda", "layer")) == [nccl + second] * 3
        assert engines(plan("3xcuda", "tensor")) == [nccl + HOPPER.peer_bytes + second] * 3
        assert engines(plan("2xcuda", "batch")) == [second] * 2, "copies exchange nothing"
    tensor = plan("2xcuda", "tensor")
    sums = tensor.split.collectives
    assert engines(tensor) == [nccl + (second if is_built else second * sums + HOPPER.sum_bytes)] * 2
    main, helper = (each - nccl for each in engines(plan("2xcuda", "row")))
    if is_built:
        assert main == helper == second
    else:
        assert main == 2 * (helper + second) > 2 * second


@pytest.mark.parametrize(
    ("device", "mode", "more"),
    [
        ("cuda0", "layer", [0]),
        ("2xcuda", "layer", [HOPPER.communicator_bytes] * 2),
        ("2xcuda", "tensor", [HOPPER.communicator_bytes + HOPPER.sum_bytes] * 2),
    ],
)
def test_nccl_is_counted_for_tensorrt_too(decoder: Path, device: str, mode: str, more: list[int]) -> None:
    """On two H100s such ranks held 0.6 to 0.8 GiB more than weights and activations."""
    plan = plan_model(decoder, [device], Request(split_mode=mode, engine="tensorrt", memory=["4GiB"]))
    assert [rank.memory.engines for rank in plan.ranks] == more


def test_model_inside_control_flow_runs_on_one_device(tmp_path: Path) -> None:
    """A merged decoder is one If, which can't be cut."""
    weight = ", ".join("0.5" for _ in range(64))
    text = f"""
    <ir_version: 8, opset_import: ["" : 17]>
    model (bool first, float[4, 8] x) => (float[4, 8] y)
    <float[8, 8] w = {{{weight}}}>
    {{
        y = If (first) <
            then_branch = first_step () => (float[4, 8] a) {{ a = MatMul(x, w) }},
            else_branch = later_step () => (float[4, 8] b) {{ c = MatMul(x, w)  b = Relu(c) }}
        >
    }}
    """
    model = ir.from_onnx_text(text)
    model.graph[-1].name = "first::or_later"
    ir.save(model, tmp_path / "model.onnx")
    plan = plan_model(tmp_path / "model.onnx", ["2xcpu"], Request(memory=["1GiB"]))
    assert len(plan.ranks) == 1
    assert "does not cut inside control flow without --set first=true" in str(
        next(c.refused for c in plan.alternatives if c.name == "layer on 2")
    )


def test_options_of_one_mode_are_refused(decoder: Path) -> None:
    with pytest.raises(MisuseError, match="--main-device is for --split-mode row"):
        plan_model(decoder, ["2xcpu"], Request(main_device="cpu1"))


@pytest.mark.parametrize(
    ("wrong", "message"),
    [({"threads": 5000}, "--threads 5000: it is a number"), ({"batch_groups": 3}, "no 3 equal groups")],
)
def test_what_no_mode_can_have_is_a_misuse(wrong: dict[str, Any], message: str, decoder: Path) -> None:
    with pytest.raises(MisuseError, match=message):
        plan_model(decoder, ["2xcpu"], Request(**wrong))


def test_plan_file_has_what_was_compared_and_compiles(decoder: Path, tmp_path: Path) -> None:
    plan = plan_model(decoder, ["2xcpu"], Request(memory=["1GiB"]))
    write_plan(plan, tmp_path / "plan.json")
    written = json.loads((tmp_path / "plan.json").read_text())
    assert written["choice"] == plan.choice
    assert [each["name"] for each in written["candidates"]] == [each.name for each in plan.alternatives]
    assert plan_from_file(decoder, tmp_path / "plan.json").split_mode == plan.split_mode
    shown = splitc("plan", decoder, "-d", "2xcpu").stdout
    assert "candidate" in shown and "chosen: " in shown


def test_prediction_knows_streams_sums_and_crossing(decoder: Path) -> None:
    free = Machine({"cpu-cpu": FREE}, {"cpu-cpu": FREE})
    slow = Machine({"cpu-cpu": Link(1.0, 0.0)}, {"cpu-cpu": Link(1.0, 0.0)})
    layer = plan_model(decoder, ["2xcpu"], Request(split_mode="layer", spread=True))
    found = predict(layer, free, 1)
    assert 0 < found.interval < found.latency
    assert predict(layer, slow, 1).latency == pytest.approx(found.latency + 1, rel=1e-3), "one hand-over"
    tensor = plan_model(decoder, ["2xcpu"], Request(split_mode="tensor"))
    gained = predict(tensor, slow, 1).latency - predict(tensor, free, 1).latency
    assert gained == pytest.approx(tensor.split.collectives), "each sum costs the link once"
    assert predict(tensor, free, 1, measured=2.0).latency > predict(tensor, free, 1).latency


def test_caller_of_a_stream_holds_up_threads_that_wait_for_each_other(
    decoder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a thread on each core, the caller needs one of the cores too. One device is faster then."""
    monkeypatch.setattr("splitc.compiler.planning.clock.cores", lambda: 2)
    free = Machine({"cpu-cpu": FREE}, {"cpu-cpu": FREE})
    one = plan_model(decoder, ["cpu0"], Request())
    tensor, layer = (
        plan_model(decoder, ["2xcpu"], Request(split_mode=mode, spread=True)) for mode in ("tensor", "layer")
    )

    def held_up(plan: Plan, threads: int) -> bool:
        prediction = predict(plan, free, threads)
        return prediction.interval > prediction.latency

    assert held_up(one, 2) and not held_up(one, 1)
    assert held_up(tensor, 1)
    assert not held_up(layer, 1)


def test_states_stay_where_they_are(decoder: Path) -> None:
    """A request is a step of a sequence: predictions do not count copies of its caches to and from devices."""
    machine = Machine({"cpu-cpu": FREE}, {"cpu-cpu": FREE})
    for mode in ("layer", "tensor"):
        plan = plan_model(decoder, ["2xcpu"], Request(split_mode=mode, spread=True))
        stateless = replace(plan, analysis=replace(plan.analysis, states=()))
        assert predict(stateless, machine, 1).latency > predict(plan, machine, 1).latency


@pytest.mark.parametrize("link", [FREE, SLOW])
def test_small_kernels_of_gpus_do_not_divide(link: Link, decoder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    machine = Machine({"cuda0-cuda1": link}, {"cuda0-cuda1": link})
    monkeypatch.setattr("splitc.compiler.modes.choosing.known_machine", lambda: machine)
    plan = plan_model(decoder, ["2xcuda"], Request(memory=["8GiB"], engine="onnxruntime", objective="latency"))
    assert str(plan.choice).startswith("one device:")
