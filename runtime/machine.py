"""How fast values get from device to device on this machine: measured once, and kept."""

from __future__ import annotations

import hashlib
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import combinations
from statistics import median
from typing import Any

import msgspec
import numpy as np
from msgspec import Struct

from splitc.runtime.cache import read_cache, write_cache
from splitc.runtime.collectives import Transport
from splitc.runtime.collectives.connect import connect_devices
from splitc.runtime.devices import Device
from splitc.runtime.engines import Backend
from splitc.runtime.engines.backends import make_backend
from splitc.runtime.engines.gpu_array import Tape
from splitc.runtime.engines.kinds import ONNXRUNTIME
from splitc.runtime.replay.capture import capture
from splitc.runtime.steps import Reduce

# Bytes of the values that are sent: what costs time by itself, and what costs time by its size.
SIZES = (1 << 10, 1 << 16, 1 << 20, 1 << 24)
WARMUP, RUNS = 5, 25
# Seconds below which nothing is told apart from nothing.
SHORTEST = 1e-7
# Where what was measured is kept.
FILE = "machine.json"


class Link(Struct, frozen=True):
    """Seconds that a value takes between two devices: `latency`, and `per_byte` for each of its bytes."""

    latency: float
    per_byte: float

    def seconds(self, size: int) -> float:
        """For so many bytes."""
        return self.latency + size * self.per_byte


class Measured(Struct, frozen=True):
    """One size as it was measured, in seconds: to copy a value from one device to the other, and to sum over both."""

    bytes: int
    copy: float
    reduce: float


class Machine(Struct, frozen=True):
    """Copies and sums between pairs of devices, named `cpu-cpu` or `cuda0-cuda1`, as far as they were measured."""

    copies: dict[str, Link] = {}
    sums: dict[str, Link] = {}
    measured: dict[str, list[Measured]] = {}

    def copy(self, one: Device, other: Device) -> Link:
        """The link from one device to another, or a typical one."""
        return self.copies.get(pair(one, other), TYPICAL_COPY[kind(one, other)])

    def sum(self, one: Device, other: Device) -> Link:
        """The sum over two devices, or a typical one."""
        return self.sums.get(pair(one, other), TYPICAL_SUM[kind(one, other)])


# What a machine has that was not measured. Threads of one process hand a value on as it is, and wake each other; GPUs
# have PCI Express 4 between them, and replay what they do.
TYPICAL_COPY = {"cpu": Link(3e-5, 0.0), "cuda": Link(1e-5, 5e-11), "mixed": Link(5e-5, 1e-10)}
TYPICAL_SUM = {"cpu": Link(6e-5, 2e-10), "cuda": Link(1e-5, 1e-10), "mixed": Link(1e-4, 4e-10)}


def kind(one: Device, other: Device) -> str:
    """`cpu`, `cuda`, or `mixed`."""
    return one.kind if one.kind == other.kind else "mixed"


def pair(one: Device, other: Device) -> str:
    """The name of two devices, in either order: all CPU devices are alike."""
    return "-".join(sorted("cpu" if device.kind == "cpu" else str(device) for device in (one, other)))


def known_machine() -> Machine:
    """What `splitc devices --measure` found on this machine; nothing where it never ran."""
    try:
        return msgspec.json.decode(read_cache(FILE), type=Machine)
    except msgspec.DecodeError:
        return Machine()


def measure_machine(devices: Sequence[Device]) -> Machine:
    """Measure each pair of the devices, and keep that. Raises PackageError for a GPU that can't be used."""
    measured = {pair(*two): _measure_pair(two) for two in combinations(devices, 2)}
    machine = Machine(
        {name: _fit([(each.bytes, each.copy) for each in found]) for name, found in measured.items()},
        {name: _fit([(each.bytes, each.reduce) for each in found]) for name, found in measured.items()},
        measured,
    )
    write_cache(FILE, msgspec.json.format(msgspec.json.encode(machine), indent=2) + b"\n")
    return machine


def _fit(points: Sequence[tuple[int, float]]) -> Link:
    """The line through the measured times that errs least in proportion; neither part is below 0."""
    sizes, seconds = (np.array(each, dtype=float) for each in zip(*points))
    rows = np.stack([np.ones_like(sizes), sizes], axis=1) / seconds[:, None]
    (latency, per_byte), *_ = np.linalg.lstsq(rows, np.ones_like(seconds), rcond=None)
    if latency < 0 or per_byte < 0:
        return Link(float(seconds.min()), max(0.0, float((seconds[-1] - seconds.min()) / sizes[-1])))
    return Link(float(latency), float(per_byte))


def _measure_pair(devices: Sequence[Device]) -> list[Measured]:
    backends = [make_backend(ONNXRUNTIME, device, 1) for device in devices]
    ends = connect_devices(devices, backends)
    direct = all(getattr(end, "direct", False) for end in ends)
    measure = _measure_replayed if direct else _measure_waiting
    return [measure(backends, ends, np.zeros(size // 4, np.float32)) for size in SIZES]


def _measure_waiting(backends: Sequence[Backend], ends: Sequence[Transport], array: Any) -> Measured:
    """Devices whose hosts' threads wait for each other."""
    pauses: list[float] = []

    def pause() -> None:
        start = time.perf_counter()
        _be_busy()
        pauses.append(time.perf_counter() - start)

    # There and back again, each time to one who has been waiting: half of it is one way.
    there = _time_both(backends, lambda rank, value: _bounce(rank, ends[rank], value, pause), array)
    on_the_way = median(max(SHORTEST, whole - pause) for whole, pause in zip(there, pauses[WARMUP:]))
    together = _time_both(backends, lambda rank, value: _sum(ends[rank], backends[rank], value), array)
    return Measured(array.nbytes, on_the_way / 2, median(together))


def _measure_replayed(backends: Sequence[Any], ends: Sequence[Any], array: Any) -> Measured:
    """GPUs that have access to each other's memory, which replay what they do: as a part of that."""
    sums = _time_replayed(backends, ends, lambda rank, value: _sum(ends[rank], backends[rank], value), array)
    there = _time_replayed(backends, ends, lambda rank, value: _bounce(rank, ends[rank], value), array)
    return Measured(array.nbytes, there / 2, sums)


def _time_replayed(backends: Sequence[Any], ends: Sequence[Any], work: Callable[[int, Any], Any], array: Any) -> float:
    """Median seconds of the work, of which a graph does RUNS in a row."""

    def run(rank: int) -> Any:
        gpu = backends[rank]
        gpu.attach()

        def give() -> None:
            value = gpu.empty(array.shape, str(array.dtype))
            for _ in range(RUNS):
                value = work(rank, value)

        work(rank, gpu.upload(array))  # plainly, so that its kernel is there
        return capture(gpu, ends[rank], range(len(ends)), Tape(), give)

    with ThreadPoolExecutor(len(ends)) as pool:
        captured, *_ = pool.map(run, range(len(ends)))
    seconds: list[float] = [captured.play() / RUNS for _ in range(WARMUP + RUNS)]
    return median(seconds[WARMUP:])


# What a rank does while the other one waits, as if it ran an engine: the other's core goes to sleep meanwhile, and a
# hand-over between cores that are awake takes a tenth of the time. Hashing leaves the interpreter's lock.
_WORK = bytes(1 << 19)


def _be_busy() -> None:
    hashlib.sha256(_WORK).digest()


def _bounce(rank: int, end: Transport, value: Any, pause: Callable[[], None] = lambda: None) -> Any:
    """Rank 0 sends the value, and rank 1 sends it back after a `pause`."""
    if rank == 0:
        end.send(1, "x", value)
        return end.receive(1, "x")
    value = end.receive(0, "x")
    pause()
    end.send(0, "x", value)
    return value


def _sum(end: Transport, backend: Backend, value: Any) -> Any:
    """Both ranks hand the value in; rank 1 does so first, and waits for rank 0."""
    return end.reduce(Reduce("sum", ["x"], ["x"], [0, 1]), [value], backend.accumulate)[0]


def _time_both(backends: Sequence[Backend], work: Callable[[int, Any], Any], array: Any) -> list[float]:
    """Seconds of the work, from when the busy rank 0 begins with it until both ranks have its result."""
    starts: list[float] = []
    ends: list[list[float]] = [[], []]

    def run(rank: int) -> None:
        backend = backends[rank]
        backend.attach()
        value = backend.upload(array)
        for _ in range(WARMUP + RUNS):
            if rank == 0:
                _be_busy()
                starts.append(time.perf_counter())
            value = work(rank, value)
            backend.wait_all()
            ends[rank].append(time.perf_counter())

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return [max(first, second) - start for start, first, second in zip(starts, ends[0], ends[1])][WARMUP:]
