"""Sessions on GPUs, with GPUs that are not there (`fake_cupy`): what goes from rank to rank, and who waits for whom."""

from __future__ import annotations

import threading
import time
from pathlib import Path
from typing import Any

import pytest

from splitc.runtime import Session
from splitc.runtime.devices import list_devices
from splitc.runtime.errors import EngineError, PackageError
from tests.conftest import assert_close, decoder_feeds, run_whole
from tests.helpers import fake_cupy
from tests.helpers.fake_gpus import FakeBackend, HostEngine, package
from tests.helpers.workers import workers_of

pytestmark = pytest.mark.usefixtures("gpus")

PLACES = [
    ("layer", ["cuda0", "cuda1", "cuda2"]),
    ("tensor", ["cuda0", "cuda1"]),
    ("layer", ["cuda0", "cpu0", "cuda1"]),  # through the host where one is a CPU device
    ("tensor", ["cuda0", "cpu0"]),
    ("layer", ["cuda0", "cuda0"]),  # two ranks on one GPU
    ("tensor", ["cuda0", "cuda0", "cuda1"]),
]


@pytest.mark.parametrize(("mode", "devices"), PLACES)
def test_outputs_are_the_models(decoder: Path, mode: str, devices: list[str]) -> None:
    with Session(package(decoder, mode, len(devices)), devices=devices, in_flight=4) as session:
        sizes = [(1, 1, 4), (2, 3, 5), (1, 7, 0), (1, 1, 4)]
        feeds = [decoder_feeds(*size) for size in sizes]
        for given, outputs in zip(feeds * 3, session.map(feeds * 3)):
            assert_close(outputs, run_whole(decoder, given))
        assert len(session.device_memory()) == sum(device.startswith("cuda") for device in devices)


@pytest.mark.parametrize("failing", [0, 2])
@pytest.mark.parametrize(("mode", "devices"), PLACES[:2])
def test_request_that_fails_on_one_gpu_fails_alone(decoder: Path, mode: str, devices: list[str], failing: int) -> None:
    """The others wait in a collective on their GPUs, and would for ever."""
    FakeBackend.failing = (1, failing)
    feeds = decoder_feeds()
    whole = run_whole(decoder, feeds)
    place = package(decoder, mode, len(devices))
    with Session(place, devices=devices, in_flight=8, cuda_graphs=False) as session:
        futures = [session.submit(feeds) for _ in range(6)]
        for number, future in enumerate(futures):
            if number == failing:
                assert "on purpose" in str(future.exception(timeout=20))
            else:
                assert_close(future.result(timeout=20), whole)


def test_copies_that_come_out_wrong_go_through_the_host(decoder: Path) -> None:
    fake_cupy.WRONG.add((0, 1))
    with Session(package(decoder, "layer", 2), devices=["cuda0", "cuda1"]) as session:
        assert session.by_host == [("cuda0", "cuda1")]
        assert_close(session.run(decoder_feeds()), run_whole(decoder, decoder_feeds()))


def test_states_stay_on_the_gpus(decoder: Path) -> None:
    place = package(decoder, "tensor", 2)
    with Session(place) as on_cpu, Session(place, devices=["cuda0", "cuda1"]) as session:
        expected = list(on_cpu.generate([1, 2, 3], max_new_tokens=12))
        assert list(session.generate([1, 2, 3], max_new_tokens=12)) == expected


def test_hang_ends_in_an_error(decoder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("splitc.runtime.engines.gpu_device.PATIENCE", 1.0)
    stuck = threading.Event()
    with Session(package(decoder, "layer", 2), devices=["cuda0", "cuda1"]) as session:
        stream = workers_of(session)[1].backend.stream  # type: ignore[attr-defined]
        stream.put(stuck.wait)
        with pytest.raises(EngineError, match=r"cuda1 did not finish within 1 s: it seems to hang"):
            session.run(decoder_feeds())
        stuck.set()


def test_rank_that_can_not_load_keeps_nobody_waiting(decoder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The others are about to make a communicator with it."""
    load = FakeBackend.load

    def fail(self: FakeBackend, path: Path, source: Path | None = None, *options: Any) -> HostEngine:
        if self.index == 1:
            raise PackageError("out of memory on purpose")
        return load(self, path, source)

    monkeypatch.setattr(FakeBackend, "load", fail)
    place = package(decoder, "tensor", 3)
    start = time.monotonic()
    with pytest.raises(PackageError, match="out of memory on purpose"):
        Session(place, devices=["cuda0", "cuda1", "cuda2"])
    assert time.monotonic() - start < 10
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("splitc rank")]


def test_gpu_that_is_not_there_is_named(decoder: Path) -> None:
    with pytest.raises(PackageError, match=r"there is no cuda7: this machine has 4 GPUs"):
        Session(package(decoder, "layer", 2), devices=["cuda0", "cuda7"])


def test_gpus_are_listed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("splitc.runtime.devices.list_gpus", __import__("splitc.runtime.gpus").runtime.gpus.list_gpus)
    _, first, *_ = list_devices()
    assert (first.name, first.description, first.compute_capability) == ("cuda0", "NVIDIA Imaginary", "9.0")
    assert first.peers == {"cuda1": "peer", "cuda2": "peer", "cuda3": "peer"}
    assert first.free_bytes == 60 << 30
