"""Host memory that GPUs copy from and to directly: it is unregistered with CUDA before it is freed."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from splitc.runtime.errors import EngineError
from splitc.runtime.gpu import device as gpu_device
from splitc.runtime.gpu.device import GpuDevice
from splitc.runtime.hardware.devices import Device
from splitc.runtime.ipc.channel import Channel
from splitc.runtime.ipc.demand import LEAST, RECENT, WASTE
from splitc.runtime.ipc.shared_memory import Lender
from splitc.runtime.processes.wire import SocketControl
from tests.helpers import fake_cupy
from tests.helpers.fake_gpus import FakeBackend

SHAPES: dict[str, tuple[tuple[int, ...], np.dtype[Any]]] = {
    "a": ((1000,), np.dtype(np.float32)),
    "b": ((3,), np.dtype(np.int64)),
}


@pytest.fixture
def gpu(gpus: None) -> Iterator[FakeBackend]:
    fake_cupy.REGISTERED.clear()
    fake_cupy.FREED.clear()
    yield FakeBackend(Device("cuda", 1))
    assert fake_cupy.FREED == []


def test_memory_is_unregistered_before_it_is_freed(gpu: FakeBackend) -> None:
    lender = Lender(gpu.pin)
    arrays = lender.allocate(SHAPES)
    lender.allocate({"a": ((100_000,), np.dtype(np.float32))})
    assert len(fake_cupy.REGISTERED) == 2
    del lender
    (size,) = fake_cupy.REGISTERED.values()  # of the arrays that are left
    part = arrays["a"][10:20]
    del arrays
    assert list(fake_cupy.REGISTERED.values()) == [size]
    del part
    assert fake_cupy.REGISTERED == {}


def test_a_rank_that_ends_frees_it_in_a_process_that_goes_on(gpu: FakeBackend) -> None:
    """Others would get the same addresses, which CUDA would take for registered ones."""
    ours, theirs = socket.socketpair()
    with theirs:
        channel = Channel(ours.detach())
        for _ in range(3):
            control = SocketControl(channel, 0, 0.0)
            room = control.allocator(gpu)
            assert room is not None
            room(SHAPES)
            control.release()
            assert fake_cupy.REGISTERED == {}
        channel.close()


def test_a_gpu_that_hangs_keeps_it(gpu: FakeBackend, monkeypatch: pytest.MonkeyPatch) -> None:
    """It may still copy, and freeing would wait for it."""
    stuck: list[GpuDevice] = []
    monkeypatch.setattr(gpu_device, "_STUCK", stuck)
    lender = Lender(gpu.pin)
    lender.allocate(SHAPES)

    def hang(*args: object) -> None:
        raise EngineError("cuda1 did not finish")

    monkeypatch.setattr(gpu, "wait", hang)
    gpu.detach()
    del lender
    (kept,) = fake_cupy.REGISTERED
    assert stuck == [gpu]
    fake_cupy.host_unregister(kept)  # which sees that it is there


def test_the_pool_gives_back_what_is_many_times_too_large(gpu: FakeBackend) -> None:
    freed = fake_cupy.PINNED.freed

    def take(*sizes: int) -> int:
        for number in range(2 * RECENT):
            gpu.pinned((sizes[number % len(sizes)],), np.uint8)
        return fake_cupy.PINNED.freed - freed

    assert take(LEAST * WASTE * 2, 100) == 0
    assert take(100) == 1
    assert take(100, LEAST) == 1


def test_large_outputs_are_not_copied_again(gpu: FakeBackend, monkeypatch: pytest.MonkeyPatch) -> None:
    """They are the pinned memory that the GPU wrote; small outputs are copies, so that the pinned memory is reused."""
    monkeypatch.setattr(gpu_device, "NOT_COPIED", 4004)
    numbers = {"small": np.arange(1000, dtype=np.float32), "large": np.arange(1001, dtype=np.float32)}
    found = gpu.download({name: gpu.upload(array) for name, array in numbers.items()})
    for name, array in numbers.items():
        np.testing.assert_array_equal(found[name], array)
    assert {name: found[name].base is None for name in found} == {"small": True, "large": False}
