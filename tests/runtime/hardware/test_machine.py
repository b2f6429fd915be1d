"""The profile of a machine, measured or typical."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest
from typer.testing import CliRunner

from splitc.runtime.cli.app import app
from splitc.runtime.errors import MisuseError
from splitc.runtime.files import cache
from splitc.runtime.hardware.devices import parse_devices
from splitc.runtime.hardware.machine import Machine, MeasuredSpeed, keep_machine, known_machine
from splitc.runtime.hardware.profiles import CPU, HOPPER, MIXED_SUM, Link
from splitc.runtime.tools import link_times

CPU0, CPU5, GPU = parse_devices(["cpu0", "cpu5", "cuda1"])


def test_what_was_measured_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert known_machine() == Machine()
    machine = Machine(copies={"cpu-cpu": Link(1.0, 2.0)}, speeds={"cuda1": MeasuredSpeed(1e12)})
    keep_machine(machine)
    assert known_machine() == machine
    assert machine.copy(CPU5, CPU0) == Link(1.0, 2.0)
    assert machine.speed(GPU) == MeasuredSpeed(1e12, None)


def test_what_was_not_measured_is_typical() -> None:
    assert Machine().copy(CPU0, CPU5) == CPU.copy
    assert Machine().sum(GPU, GPU) == HOPPER.sum
    assert Machine().sum(GPU, CPU0) == MIXED_SUM
    assert Machine().speed(CPU0) == MeasuredSpeed(None, None)


def test_devices_of_other_hosts_are_as_those_here_and_further_away() -> None:
    near, far, other = parse_devices(["host0/cuda0", "host0/cuda1", "host1/cuda0"])
    known = Machine({"cuda0-cuda1": Link(1.0, 0.0)}, speeds={"cuda0": MeasuredSpeed(1e12)})
    assert known.copy(near, far) == Link(1.0, 0.0)
    assert known.speed(other) == MeasuredSpeed(1e12)
    assert known.copy(near, other) == Link(1.2e-5, HOPPER.copy.per_byte)
    assert Machine(interconnect=Link(2.0, 3.0)).copy(near, other) == Link(2.0, 3.0)


def test_damaged_cache_is_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    (tmp_path / "splitc").mkdir()
    (tmp_path / "splitc" / "machine.json").write_text("{")
    assert known_machine() == Machine()


def test_cache_of_before_speeds_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    (tmp_path / "splitc").mkdir()
    (tmp_path / "splitc" / "machine.json").write_text('{"copies": {"cpu-cpu": {"latency": 1.0, "per_byte": 2.0}}}')
    assert known_machine() == Machine(copies={"cpu-cpu": Link(1.0, 2.0)})


@pytest.mark.parametrize("place", ["{}/file", "/proc/nowhere"])
def test_measurements_that_can_t_be_kept_are_shown(place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", place.format(tmp_path))
    measured = Machine(speeds={"cpu": MeasuredSpeed(7e12)})
    monkeypatch.setattr(link_times, "measure_machine", lambda devices: measured)
    found = CliRunner().invoke(app, ["devices", "--measure", "--json"])
    assert msgspec.json.decode(found.stdout, type=Machine) == measured
    assert isinstance(found.exception, MisuseError)
    with pytest.raises(MisuseError, match=r"can't be kept for later: .* \(set XDG_CACHE_HOME to a folder for them\)"):
        raise found.exception
    assert known_machine() == Machine()
    assert CliRunner().invoke(app, ["devices"]).exit_code == 0


def test_a_user_without_a_home_has_no_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """There is neither a folder named ~ in the working folder, nor a traceback."""

    def none(*_: Any, **__: Any) -> Path:
        raise RuntimeError("could not determine the home directory")

    monkeypatch.chdir(tmp_path)
    for place in (lambda *_, **__: Path("~/.cache/splitc"), none):
        monkeypatch.setattr(cache, "user_cache_path", place)
        with pytest.raises(MisuseError, match=r"can't be kept for later: .* home"):
            keep_machine(Machine())
        assert known_machine() == Machine()
    assert not list(tmp_path.iterdir())
