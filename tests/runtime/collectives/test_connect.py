"""Which way of connecting ranks serves which devices."""

from __future__ import annotations

import pytest

from splitc.runtime.collectives.connect import CONNECTIONS, connect_devices
from splitc.runtime.devices import parse_devices
from splitc.runtime.engines.onnxruntime_cpu import OnnxRuntimeBackend
from splitc.runtime.entries import load_entry
from tests.helpers import fake_cupy
from tests.helpers.fake_gpus import FakeBackend


def test_ways_are_there() -> None:
    assert all(callable(load_entry(way.connect)) for way in CONNECTIONS)


def test_cpu_devices_are_connected_on_the_host() -> None:
    ends = connect_devices(parse_devices(["3xcpu"]), [OnnxRuntimeBackend(1)] * 3)
    assert [end.rank for end in ends] == [0, 1, 2]
    assert not any(end.capturable or end.by_host for end in ends)


@pytest.mark.usefixtures("gpus")
@pytest.mark.parametrize("names", [["cuda0", "cuda1"], ["cuda0", "cpu0"]])
def test_gpus_are_connected_to_all(names: list[str]) -> None:
    devices = parse_devices(names)
    backends = [FakeBackend(each) if each.kind == "cuda" else OnnxRuntimeBackend(1) for each in devices]
    ends = connect_devices(devices, backends)
    assert [end.capturable for end in ends] == [names == ["cuda0", "cuda1"]] * 2


@pytest.mark.usefixtures("gpus")
def test_copies_that_come_out_wrong_are_found() -> None:
    fake_cupy.WRONG.add((1, 0))
    ends = connect_devices(parse_devices(["2xcuda"]), [FakeBackend(each) for each in parse_devices(["2xcuda"])])
    assert [end.by_host for end in ends] == [frozenset({(1, 0)})] * 2
    assert not any(end.capturable for end in ends)
