"""Measured times and memory of blocks: taken on the device, kept by content, and used in plans."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import onnx_ir as ir
import pytest

from models.writer import save
from splitc.compiler import Request, api, plan_model
from splitc.compiler.analysis.facts import analyze
from splitc.compiler.packaging import profiling as profile
from splitc.compiler.planning.measured import block_activations, single_blocks
from splitc.compiler.planning.resources import Resources
from splitc.compiler.request.shapes import AskedShapes
from splitc.runtime.errors import DoesNotFitError
from splitc.runtime.hardware.devices import Device, cores, parse_devices
from splitc.runtime.hardware.gpus import GpuIdentity
from splitc.runtime.tools.engine_costs import EngineCosts
from tests.helpers.blocks import Block


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path / "splitc" / "block_costs.json"


def test_blocks_are_measured_and_known_content_is_not_measured_again(
    deep_decoder: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    devices = parse_devices(["2xcpu"])
    request = Request(split_mode="layer", shapes={"input_ids": (1, 8)}, profile=True)
    first = plan_model(deep_decoder, devices, request)
    # Prologue, layers, and epilogue, which has the final norm.
    assert len(json.loads(cache.read_text())) == 3

    def fail(*_: object) -> EngineCosts:
        raise AssertionError("measured again")

    monkeypatch.setattr(profile, "_measure", fail)
    costs = profile.measure_blocks(first.analysis, devices, None)
    assert len(costs) == 6
    assert all(block.seconds > 0 for block in costs)
    resources = Resources(tuple(parse_devices(["cpu0"])), (None,), 1, lambda *_: costs)
    for block in block_activations(first.analysis, resources, 0) or ():  # of some 100 KiB, beside what libraries take
        assert block.measured < block.predicted + (8 << 20)
    second = plan_model(deep_decoder, devices, request)
    assert [rank.seconds for rank in second.ranks] == [rank.seconds for rank in first.ranks]
    with pytest.raises(AssertionError, match="measured again"):
        plan_model(deep_decoder, devices, replace(request, shapes={"input_ids": (1, 9)}))


def test_what_was_measured_is_of_gpus_of_one_name(decoder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Several machines may share a home folder, and a machine may get another GPU."""
    gpus = {0: "NVIDIA Imaginary", 1: "NVIDIA Imaginary", 2: "NVIDIA Conceivable"}
    monkeypatch.setattr(profile, "identify_gpu", lambda number: GpuIdentity(f"bus {number}", gpus[number], 1 << 30))
    monkeypatch.setattr(profile, "_measure", lambda _, stage, device, __: EngineCosts(device.index, 0))
    analysis = analyze(decoder, AskedShapes({"input_ids": (1, 8)}), 1)
    first, alike, other = (profile.measure_blocks(analysis, [Device("cuda", number)], 1) for number in gpus)
    assert [cost.seconds for cost in first] == [cost.seconds for cost in alike] == [0] * len(first)
    assert [cost.seconds for cost in other] == [2] * len(first)


def test_a_home_that_can_t_be_written_costs_time_only(
    decoder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    measured: list[object] = []

    def measure(analysis: object, stage: object, *_: object) -> EngineCosts:
        measured.append(stage)
        return EngineCosts(0.001, 0)

    monkeypatch.setattr(profile, "_measure", measure)
    request = Request(shapes={"input_ids": (1, 8)}, profile=True)
    assert len(plan_model(decoder, parse_devices(["2xcpu"]), request).ranks)
    assert len(measured) == 2 * 3  # one of each form on one device and on two, for all candidates


@pytest.mark.kept_analyses
def test_planner_goes_by_what_was_measured(deep_decoder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """If the first layer takes as long as all others together, it gets its own device."""
    costs = [EngineCosts(seconds, 0) for seconds in (0.0, 3.0, 1.0, 1.0, 1.0, 0.0)]
    monkeypatch.setattr(api, "measure_blocks", lambda *_: costs)
    plan = plan_model(deep_decoder, parse_devices(["2xcpu"]), Request(split_mode="layer", profile=True))
    assert [block.name for block in plan.ranks[0].stage.blocks] == ["prologue", "layers.0"]


@pytest.mark.parametrize("mode", ["layer", "batch"])
def test_blocks_are_measured_with_the_threads_of_a_device(
    mode: str, decoder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Groups of devices divide the cores as stages do."""
    taken: set[int] = set()

    def measure(_analysis: object, _stage: object, _device: object, threads: int) -> EngineCosts:
        taken.add(threads)
        return EngineCosts(0.1, 0)

    monkeypatch.setattr(profile, "_measure", measure)
    plan_model(decoder, "2xcpu", Request(split_mode=mode, shapes={"input_ids": (2, 8)}, profile=True))
    assert taken == {max(1, cores() // 2)}


@pytest.mark.kept_analyses
@pytest.mark.parametrize("mode", ["layer", "tensor", "row"])
def test_measured_memory_stands_in_place_of_what_is_predicted(
    decoder: Path, monkeypatch: pytest.MonkeyPatch, mode: str
) -> None:
    """If a layer takes 64 MiB, so does its rank, or each rank with a shard of it. A smaller budget is refused."""
    costs = [EngineCosts(1.0, size) for size in (0, 64 << 20, 0, 0)]
    monkeypatch.setattr(api, "measure_blocks", lambda *_: costs)
    request = Request(split_mode=mode, spread=mode == "layer")
    if mode == "row":
        request = replace(request, row_min=32)
    predicted = plan_model(decoder, ["2xcpu"], request).ranks
    measured = plan_model(decoder, ["2xcpu"], replace(request, profile=True)).ranks
    more = [new.memory.activations - old.memory.activations for new, old in zip(measured, predicted, strict=True)]
    if mode == "tensor":
        assert min(more) > 16 << 20
    else:
        assert 45 << 20 < more[0] < 64 << 20
        assert more[1] <= 0
    with pytest.raises(DoesNotFitError):
        plan_model(decoder, ["2xcpu"], replace(request, profile=True, memory=["40MiB"]))
    assert plan_model(decoder, ["2xcpu"], replace(request, memory=["40MiB"]))


def test_blocks_are_given_the_sizes_that_others_compute(tmp_path: Path) -> None:
    """As in a denoiser, whose images become rows of pixels and then images again."""
    b = Block()
    value = b.op("Conv", b.data("x", (1, 4, 16, 16), ["n", 4, "h", "w"]), b.w("first", 8, 4, 3, 3), strides=[2, 2])
    sizes = b.op("Shape", value)
    for number in range(4):
        value = b.op("Relu", b.op("Conv", value, b.w(f"{number}", 8, 8, 1, 1)))
    pixels = b.op("ReduceProd", b.op("Slice", sizes, b.ints(2), b.ints(4)))
    rows = b.op("Reshape", value, b.op("Concat", b.ints(1, 8), pixels, axis=0))
    b.give(b.op("Reshape", b.op("Neg", rows), sizes), "y", ["n", 8, "p", "q"])
    save(b.model(), tmp_path / "model.onnx")
    analysis = analyze(tmp_path / "model.onnx", AskedShapes({"x": (1, 4, 16, 16)}), 3)
    taken = [value for stage in single_blocks(analysis) for value in stage.takes if value.dtype == ir.DataType.INT64]
    assert taken
    given = dict(profile._inputs(analysis, taken))
    assert [array.ravel().tolist() for array in given.values()] == [[1, 8, 7, 7], [49]]
