"""Measure the times of copies and sums between devices."""

from __future__ import annotations

import hashlib
import socket
import time
from collections.abc import Callable, Sequence
from itertools import combinations
from statistics import median
from typing import Any

import numpy as np

from splitc.runtime.collectives.collectives import Collectives
from splitc.runtime.collectives.mail import ChannelMail, ProcessMail
from splitc.runtime.collectives.threads import Hub, connect
from splitc.runtime.engines import Backend
from splitc.runtime.engines.kinds import ONNXRUNTIME, has_gpu_each, make_backend
from splitc.runtime.gpu.array import Tape
from splitc.runtime.hardware.devices import Device
from splitc.runtime.hardware.machine import Machine, MeasuredLink, pair_name
from splitc.runtime.hardware.profiles import Link
from splitc.runtime.ipc.channel import Channel
from splitc.runtime.package.steps import Reduce
from splitc.runtime.ranks.recording import capture
from splitc.runtime.threads.futures import Executor
from splitc.runtime.threads.progress import counted
from splitc.runtime.tools.device_speeds import measure_speeds

# Bytes of the values that are sent: small ones show the latency, large ones the bandwidth.
MESSAGE_BYTES = (1 << 10, 1 << 16, 1 << 20, 1 << 24)
# Runs that do not count, and those whose median does. A choice: more would not change a median, and take longer.
WARMUP, RUNS = 5, 25
# The least seconds that can be measured.
SHORTEST = 1e-7


def measure_machine(devices: Sequence[Device]) -> Machine:
    """Measure each device and each pair of devices.

    Raises PackageError for a GPU that can't be used.
    """
    pairs = list(combinations(devices, 2))
    measured = {pair_name(*two): _measure_pair(two) for two in counted("measuring pairs", pairs)}
    return Machine(
        {name: fit([(timing.bytes, timing.copy) for timing in timings]) for name, timings in measured.items()},
        {name: fit([(timing.bytes, timing.reduce) for timing in timings]) for name, timings in measured.items()},
        measured,
        measure_speeds(devices),
    )


def fit(points: Sequence[tuple[int, float]]) -> Link:
    """The line through the measured times with the least squares of relative errors, with no negative part."""
    sizes, seconds = (np.array(column, dtype=float) for column in zip(*points, strict=True))
    rows = np.stack([np.ones_like(sizes), sizes], axis=1) / seconds[:, None]
    (latency, per_byte), *_ = np.linalg.lstsq(rows, np.ones_like(seconds), rcond=None)
    if latency < 0 or per_byte < 0:
        return Link(float(seconds.min()), max(0.0, float((seconds[-1] - seconds.min()) / sizes[-1])))
    return Link(float(latency), float(per_byte))


def _measure_pair(devices: Sequence[Device]) -> list[MeasuredLink]:
    backends = [make_backend(ONNXRUNTIME, device, 1) for device in devices]
    arrays = [np.zeros(size // 4, np.float32) for size in MESSAGE_BYTES]
    if all(device.kind == "cpu" for device in devices):
        return [_measure_waiting(backends, connect(Hub(2), backends), array) for array in arrays]
    mails = [ProcessMail(ends=True), ProcessMail(ends=True)]
    for rank, (mail, end) in enumerate(zip(mails, socket.socketpair(), strict=True)):
        mail.connect(1 - rank, Channel(end.detach()))
    by_nccl = has_gpu_each(devices)
    ends = [
        Collectives(rank, 2, ChannelMail(mails[rank], 0, rank, range(2)), {}, backend, by_nccl)
        for rank, backend in enumerate(backends)
    ]
    try:
        if not by_nccl:
            return [_measure_waiting(backends, ends, array) for array in arrays]
        with Executor(2) as pool:
            both = list(pool.map(lambda rank: _measure_replayed(backends[rank], ends[rank], arrays), range(2)))
        return [max(one, other, key=lambda timing: timing.reduce) for one, other in zip(*both, strict=True)]
    finally:
        for mail in mails:
            mail.finish()


def _measure_waiting(backends: Sequence[Backend], ends: Sequence[Collectives], array: Any) -> MeasuredLink:
    """Measure devices whose threads on the host wait for each other."""
    pauses: list[float] = []

    def pause() -> None:
        start = time.perf_counter()
        be_busy()
        pauses.append(time.perf_counter() - start)

    # Round trips, each time to a rank that has been waiting: half of the time is one way.
    there = _time_both(backends, lambda rank, value: bounce(rank, ends[rank], value, pause), array)
    on_the_way = median(max(SHORTEST, whole - pause) for whole, pause in zip(there, pauses[WARMUP:], strict=True))
    together = _time_both(backends, lambda rank, value: _sum(ends[rank], value), array)
    return MeasuredLink(array.nbytes, on_the_way / 2, median(together))


def _measure_replayed(gpu: Any, end: Collectives, arrays: Sequence[Any]) -> list[MeasuredLink]:
    """Measure one of two GPUs as parts of replayed CUDA graphs, while the other one does the same."""
    gpu.attach()
    end.connect()
    measured = []
    for array in arrays:
        sums = _time_replayed(gpu, end, lambda value: _sum(end, value), array)
        there = _time_replayed(gpu, end, lambda value: bounce(end.rank, end, value), array)
        measured.append(MeasuredLink(array.nbytes, there / 2, sums))
    end.release()
    return measured


def _time_replayed(gpu: Any, end: Collectives, work: Callable[[Any], Any], array: Any) -> float:
    """Median seconds of the work. A graph has RUNS repetitions of it."""

    def give() -> None:
        value = gpu.empty(array.shape, str(array.dtype))
        for _ in range(RUNS):
            value = work(value)

    work(gpu.upload(array))  # run it eagerly first, to load its kernel
    tape = Tape()
    graph, _ = capture(gpu, tape, give)
    seconds = []
    before, after = gpu.cuda.Event(), gpu.cuda.Event()
    for _ in range(WARMUP + RUNS):
        end.all_gather((0, 1), None)  # both begin now
        before.record(gpu.stream)
        graph.launch(gpu.stream)
        after.record(gpu.stream)
        gpu.wait(after)
        seconds.append(float(gpu.cuda.get_elapsed_time(before, after)) / 1e3 / RUNS)
    return median(seconds[WARMUP:])


# A rank hashes this while the other one waits, as if it ran an engine. The other one's core goes to sleep meanwhile, as
# it does in real runs: a copy between cores that are awake takes a tenth of the time. Hashing releases Python's lock.
_WORK = bytes(1 << 19)


def be_busy() -> None:
    """Be as busy as an engine, for a while."""
    hashlib.sha256(_WORK).digest()


def bounce(rank: int, end: Collectives, value: Any, pause: Callable[[], None] = lambda: None) -> Any:
    """Rank 0 sends the value, and rank 1 sends it back after a `pause`."""
    if rank == 0:
        end.send(1, "x", value)
        return end.receive(1, "x")
    value = end.receive(0, "x")
    pause()
    end.send(0, "x", value)
    return value


def _sum(end: Collectives, value: Any) -> Any:
    """Sum the value over both ranks. Rank 1 comes first and waits for rank 0."""
    return end.all_reduce(Reduce("sum", ["x"], ["x"], [0, 1]), [value])[0]


def _time_both(backends: Sequence[Backend], work: Callable[[int, Any], Any], array: Any) -> list[float]:
    """Seconds of the work, from when rank 0 begins, after having been busy, until both ranks have the result."""
    starts: list[float] = []
    ends: list[list[float]] = [[], []]

    def run(rank: int) -> None:
        backend = backends[rank]
        backend.attach()
        value = backend.upload(array)
        for _ in range(WARMUP + RUNS):
            if rank == 0:
                be_busy()
                starts.append(time.perf_counter())
            value = work(rank, value)
            backend.wait_all()
            ends[rank].append(time.perf_counter())

    with Executor(2) as pool:
        list(pool.map(run, range(2)))
    return [max(first, second) - start for start, first, second in zip(starts, *ends, strict=True)][WARMUP:]
