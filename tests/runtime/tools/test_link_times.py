"""Measured speed of copies between devices of this machine."""

from __future__ import annotations

import threading
from dataclasses import replace

import psutil
import pytest

from splitc.runtime.engines.onnxruntime_cpu import OnnxRuntimeBackend
from splitc.runtime.hardware.devices import parse_devices
from splitc.runtime.hardware.profiles import CPU, HOPPER, PROFILES, Link
from splitc.runtime.tools.link_times import fit, measure_machine
from tests.helpers import fake_nccl
from tests.helpers.fake_gpus import FakeBackend


def test_links_are_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("splitc.runtime.tools.link_times.RUNS", 7)
    cpu0, cpu5 = parse_devices(["cpu0", "cpu5"])
    for _ in range(5):  # on a busy machine most runs of the small sum may wait for a core
        machine = measure_machine([cpu0, cpu5])
        large, small = machine.measured["cpu-cpu"][-1], machine.measured["cpu-cpu"][0]
        if large.reduce > small.reduce:
            break
    assert large.reduce > small.reduce, "to sum 16 MiB takes longer than to sum 1 KiB"
    assert machine.copy(cpu5, cpu0) == machine.copies["cpu-cpu"] != CPU.copy
    assert all(each.copy > 0 and each.reduce > 0 for each in machine.measured["cpu-cpu"])
    assert set(machine.speeds) == {"cpu"}
    speed = machine.speed(cpu5)
    assert all(rate is not None and rate > 0 for rate in (speed.flops, speed.bytes, speed.cached, speed.together))


@pytest.mark.parametrize("link", [Link(1e-5, 1e-10), Link(3e-6, 0.0), Link(2e-4, 5e-9)])
def test_latency_and_bandwidth_are_fitted(link: Link) -> None:
    found = fit([(size, link.seconds(size)) for size in (1024, 65536, 1 << 20, 1 << 24)])
    assert found.latency == pytest.approx(link.latency, rel=1e-6)
    assert found.per_byte == pytest.approx(link.per_byte, rel=1e-6, abs=1e-18)


@pytest.mark.usefixtures("gpus")
def test_gpus_are_measured_as_they_replay(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("splitc.runtime.collectives.nccl.find_nccl", lambda: fake_nccl)
    monkeypatch.setattr(
        "splitc.runtime.tools.link_times.make_backend",
        lambda engine, device, threads: FakeBackend(device) if device.kind == "cuda" else OnnxRuntimeBackend(1),
    )
    # Each is exactly as long as the others, so that a few do; Python plays the GPUs, and takes its time.
    monkeypatch.setattr("splitc.runtime.tools.link_times.RUNS", 4)
    monkeypatch.setattr("splitc.runtime.tools.link_times.WARMUP", 1)
    monkeypatch.setattr("splitc.runtime.tools.link_times.MESSAGE_BYTES", (1 << 10, 1 << 14))
    monkeypatch.setattr("splitc.runtime.tools.device_speeds.GPU_SIDE", 64)
    monkeypatch.setattr("splitc.runtime.tools.device_speeds.GPU_ROWS", 8)
    launched = replace(HOPPER, launch=1e-6)
    monkeypatch.setitem(PROFILES, "cuda", launched)
    devices = parse_devices(["cuda0", "cuda1", "cpu0"])
    descriptors, before = psutil.Process().num_fds(), threading.enumerate()
    machine = measure_machine(devices)
    started = [thread for thread in threading.enumerate() if thread not in before]
    for listener in [thread for thread in started if thread.name == "splitc mail"]:
        listener.join(10)
        assert not listener.is_alive()
    assert psutil.Process().num_fds() == descriptors, "nothing is left of a pair of devices"
    found = machine.measured
    assert set(machine.speeds) == {"cuda0", "cuda1", "cpu"}
    assert all(each.flops and each.bytes for each in machine.speeds.values())
    # By the clock of simulated GPUs, each thing that a stream does takes a microsecond. A product is two, and
    # one of them is its launch.
    speed = machine.speeds["cuda0"].bytes
    assert speed is not None and 2 * 64 * 64 / 2e-6 < speed <= 2 * 64 * 64 / 1e-6
    assert set(found) == {"cuda0-cuda1", "cpu-cuda0", "cpu-cuda1"}
    for each in found["cuda0-cuda1"]:
        assert 1e-6 <= each.reduce < 2e-6
        assert 1e-6 <= each.copy < 2e-6
    assert all(each.copy > 1e-6 for each in found["cpu-cuda0"])
