"""Sessions on GPUs, with GPUs that are not there (`fake_cupy`): what goes from rank to rank, and who waits for whom."""

from __future__ import annotations

import ctypes
import threading
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, Optional

import numpy as np
import pytest

from splitc.compiler import Request, compile_model, plan_model
from splitc.runtime import Session
from splitc.runtime.devices import Device, list_devices
from splitc.runtime.engines.gpu import Gpu, GpuArray
from splitc.runtime.engines.onnxruntime import OnnxRuntimeBackend
from splitc.runtime.errors import EngineError, PackageError
from tests.conftest import assert_close, decoder_feeds, run_whole
from tests.runtime import fake_cupy


class HostEngine:
    """An ONNX Runtime engine on the CPU, that is enqueued on a fake stream and works in the stream's time."""

    def __init__(self, gpu: Gpu, path: Path) -> None:
        self._gpu = gpu
        self._backend = OnnxRuntimeBackend(1)
        self._engine = self._backend.load(path)
        self.inputs, self.outputs = self._engine.inputs, self._engine.outputs

    def connect(self, communicator: Any) -> None:
        raise AssertionError

    def run(self, values: Mapping[str, Any], into: Mapping[str, Any] = MappingProxyType({})) -> dict[str, Any]:
        held = dict(values)
        shapes = self._shapes(held)
        made = {name: self._gpu.empty(*shapes[name]) for name in self.outputs}

        def work() -> None:
            results = self._compute(held)
            for name, array in results.items():
                ctypes.memmove(made[name].pointer, array.ctypes.data, array.nbytes)

        fake_cupy.STREAMS[self._gpu.stream.ptr].work.put(work)
        return made

    def _compute(self, values: Mapping[str, GpuArray]) -> dict[str, np.ndarray[Any, Any]]:
        feeds = {}
        for name in self.inputs:
            value = values[name]
            raw = np.ctypeslib.as_array((ctypes.c_uint8 * max(1, value.nbytes)).from_address(value.pointer))
            feeds[name] = self._backend.upload(raw[: value.nbytes].copy().view(value.dtype).reshape(value.shape))
        return {n: np.ascontiguousarray(a) for n, a in self._backend.download(self._engine.run(feeds)).items()}

    def _shapes(self, values: Mapping[str, GpuArray]) -> dict[str, tuple[tuple[int, ...], str]]:
        """What TensorRT's shape inference would say; ids are 1, which is in bounds."""
        feeds = {name: self._backend.upload(np.ones(values[name].shape, values[name].dtype)) for name in self.inputs}
        found = self._backend.download(self._engine.run(feeds))
        return {name: (array.shape, str(array.dtype)) for name, array in found.items()}


class FakeBackend(Gpu):
    """Loads HostEngines on a GPU that is not there. The engine of `failing` fails in the run of that number."""

    failing: Optional[tuple[int, int]] = None

    def load(self, path: Path, source: Optional[Path] = None) -> HostEngine:
        engine = HostEngine(self, path)
        if self.failing and self.failing[0] == self.index and path.name.endswith(("stage0.1.onnx", "stage1.onnx")):
            _fail_in(engine, self.failing[1])
        return engine

    def stop(self) -> None:
        pass


def _fail_in(engine: HostEngine, number: int) -> None:
    run, runs = engine.run, iter(range(1 << 30))

    def fail(values: Mapping[str, Any], into: Mapping[str, Any] = MappingProxyType({})) -> dict[str, Any]:
        if next(runs) == number:
            raise EngineError("an engine failed on purpose")
        return run(values, into)

    engine.run = fail  # type: ignore[method-assign]


@pytest.fixture(autouse=True)
def gpus(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    cupy = fake_cupy.make()
    monkeypatch.setattr("splitc.runtime.gpu.find_cupy", lambda: cupy)
    monkeypatch.setattr("splitc.runtime.engines.gpu.need_cupy", lambda: cupy)
    monkeypatch.setattr("splitc.runtime.transport.nccl.find_nccl", fake_cupy.make_nccl)

    def make_backend(engine: str, device: Device, threads: int, build: object, cuda_graphs: bool) -> object:
        return FakeBackend(device.index) if device.kind == "cuda" else OnnxRuntimeBackend(threads)

    monkeypatch.setattr("splitc.runtime.session.make_backend", make_backend)
    yield
    FakeBackend.failing = None
    fake_cupy.WRONG.clear()


def package(model: Path, folder: Path, mode: str, ranks: int) -> Path:
    compile_model(plan_model(model, [f"{ranks}xcpu"], Request(split_mode=mode, spread=True)), folder / mode)
    return folder / mode


PLACES = [
    ("layer", ["cuda0", "cuda1", "cuda2"]),
    ("tensor", ["cuda0", "cuda1"]),
    ("layer", ["cuda0", "cpu0", "cuda1"]),  # through the host where one is a CPU device
    ("tensor", ["cuda0", "cpu0"]),
    ("layer", ["cuda0", "cuda0"]),  # two ranks on one GPU
    ("tensor", ["cuda0", "cuda0", "cuda1"]),
]


@pytest.mark.parametrize(("mode", "devices"), PLACES)
def test_outputs_are_the_models(decoder: Path, tmp_path: Path, mode: str, devices: list[str]) -> None:
    with Session(package(decoder, tmp_path, mode, len(devices)), devices=devices, in_flight=4) as session:
        sizes = [(1, 1, 4), (2, 3, 5), (1, 7, 0), (1, 1, 4)]
        feeds = [decoder_feeds(*size) for size in sizes]
        for given, outputs in zip(feeds * 3, session.map(feeds * 3)):
            assert_close(outputs, run_whole(decoder, given))
        assert len(session.device_memory()) == sum(device.startswith("cuda") for device in devices)


@pytest.mark.parametrize("failing", [0, 2])
@pytest.mark.parametrize(("mode", "devices"), PLACES[:2])
def test_request_that_fails_on_one_gpu_fails_alone(
    decoder: Path, tmp_path: Path, mode: str, devices: list[str], failing: int
) -> None:
    """The others wait in a collective on their GPUs, and would for ever."""
    FakeBackend.failing = (1, failing)
    feeds = decoder_feeds()
    whole = run_whole(decoder, feeds)
    with Session(package(decoder, tmp_path, mode, len(devices)), devices=devices, in_flight=8) as session:
        futures = [session.submit(feeds) for _ in range(6)]
        for number, future in enumerate(futures):
            if number == failing:
                assert "on purpose" in str(future.exception(timeout=20))
            else:
                assert_close(future.result(timeout=20), whole)


def test_copies_that_come_out_wrong_go_through_the_host(decoder: Path, tmp_path: Path) -> None:
    fake_cupy.WRONG.add((0, 1))
    with Session(package(decoder, tmp_path, "layer", 2), devices=["cuda0", "cuda1"]) as session:
        assert session.by_host == [("cuda0", "cuda1")]
        assert_close(session.run(decoder_feeds()), run_whole(decoder, decoder_feeds()))


def test_states_stay_on_the_gpus(decoder: Path, tmp_path: Path) -> None:
    place = package(decoder, tmp_path, "tensor", 2)
    with Session(place) as on_cpu, Session(place, devices=["cuda0", "cuda1"]) as session:
        expected = list(on_cpu.generate([1, 2, 3], max_new_tokens=12))
        assert list(session.generate([1, 2, 3], max_new_tokens=12)) == expected


def test_hang_ends_in_an_error(decoder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("splitc.runtime.engines.gpu.PATIENCE", 0.2)
    stuck = threading.Event()
    with Session(package(decoder, tmp_path, "layer", 2), devices=["cuda0", "cuda1"]) as session:
        stream = session._workers[1].backend.stream  # type: ignore[attr-defined]
        stream.work.put(stuck.wait)
        with pytest.raises(EngineError, match=r"cuda1 did not come to an end within 0 s: it seems to hang"):
            session.run(decoder_feeds())
        stuck.set()


def test_rank_that_can_not_load_keeps_nobody_waiting(
    decoder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The others are about to make a communicator with it."""
    load = FakeBackend.load

    def fail(self: FakeBackend, path: Path, source: Optional[Path] = None) -> HostEngine:
        if self.index == 1:
            raise PackageError("out of memory on purpose")
        return load(self, path, source)

    monkeypatch.setattr(FakeBackend, "load", fail)
    place = package(decoder, tmp_path, "tensor", 3)
    start = time.monotonic()
    with pytest.raises(PackageError, match="out of memory on purpose"):
        Session(place, devices=["cuda0", "cuda1", "cuda2"])
    assert time.monotonic() - start < 10
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("splitc rank")]


def test_gpu_that_is_not_there_is_named(decoder: Path, tmp_path: Path) -> None:
    with pytest.raises(PackageError, match=r"there is no cuda7: this machine has 4 GPUs"):
        Session(package(decoder, tmp_path, "layer", 2), devices=["cuda0", "cuda7"])


def test_gpus_are_listed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("splitc.runtime.devices.list_gpus", __import__("splitc.runtime.gpu").runtime.gpu.list_gpus)
    _, first, *_ = list_devices()
    assert (first.name, first.description, first.compute_capability) == ("cuda0", "NVIDIA Imaginary", "9.0")
    assert first.peers == {"cuda1": "peer", "cuda2": "peer", "cuda3": "peer"}
    assert first.free_bytes == 60 << 30
