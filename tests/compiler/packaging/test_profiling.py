"""Measured block times: taken on the device, kept by content."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from splitc.compiler import Request, api, plan_model
from splitc.compiler.analysis.facts import analyze
from splitc.compiler.packaging import profiling as profile
from splitc.compiler.request.shapes import AskedShapes
from splitc.runtime.hardware.devices import parse_devices


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path / "splitc" / "block_seconds.json"


def test_blocks_are_measured_and_equal_ones_once(decoder: Path, cache: Path) -> None:
    analysis = analyze(decoder, AskedShapes({"input_ids": (1, 8)}), 1)
    seconds = profile.measure_blocks(analysis, parse_devices(["2xcpu"]), 1)
    assert len(seconds) == 6
    assert all(each > 0 for each in seconds)
    # Prologue, the first layers, the last one (which has the final norm), epilogue.
    assert len(json.loads(cache.read_text())) == 4


def test_known_content_is_not_measured_again(decoder: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    request = Request(split_mode="layer", shapes={"input_ids": (1, 8)}, profile=True)
    first = plan_model(decoder, parse_devices(["2xcpu"]), request)

    def fail(*_: object) -> float:
        raise AssertionError("measured again")

    monkeypatch.setattr(profile, "_measure", fail)
    second = plan_model(decoder, parse_devices(["2xcpu"]), request)
    assert [rank.seconds for rank in second.ranks] == [rank.seconds for rank in first.ranks]
    with pytest.raises(AssertionError, match="measured again"):
        plan_model(
            decoder, parse_devices(["2xcpu"]), Request(split_mode="layer", shapes={"input_ids": (1, 9)}, profile=True)
        )


def test_a_home_that_can_t_be_written_costs_time_only(
    decoder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    measured: list[object] = []

    def measure(analysis: object, stage: object, *_: object) -> float:
        measured.append(stage)
        return 0.001

    monkeypatch.setattr(profile, "_measure", measure)
    request = Request(shapes={"input_ids": (1, 8)}, profile=True)
    assert len(plan_model(decoder, parse_devices(["2xcpu"]), request).ranks)
    assert len(measured) == 2 * 4  # one of each form on one device and on two, for all candidates


def test_planner_goes_by_what_was_measured(decoder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A first layer that takes as long as all others together gets a device of its own."""
    monkeypatch.setattr(api, "measure_blocks", lambda *_: [0.0, 3.0, 1.0, 1.0, 1.0, 0.0])
    plan = plan_model(decoder, parse_devices(["2xcpu"]), Request(split_mode="layer", profile=True))
    assert [block.name for block in plan.ranks[0].stage.blocks] == ["prologue", "layers.0"]
