"""Measure the link between two hosts: that of process 0, and the next one of those that MPI has started."""

from __future__ import annotations

import time
from statistics import median

import numpy as np

from splitc.runtime.collectives.collectives import Collectives
from splitc.runtime.collectives.mail import all_gather
from splitc.runtime.engines import Backend
from splitc.runtime.engines.kinds import ONNXRUNTIME, make_backend
from splitc.runtime.hardware.devices import Device
from splitc.runtime.hardware.gpus import count_gpus
from splitc.runtime.hardware.profiles import Link
from splitc.runtime.mpi.messages import Call
from splitc.runtime.mpi.wire import MpiMail
from splitc.runtime.mpi.world import World
from splitc.runtime.threads.failures import Failure, attempt
from splitc.runtime.tools.link_times import MESSAGE_BYTES, RUNS, SHORTEST, WARMUP, be_busy, bounce, fit

# No link has more than 10 TB/s, whatever the noise of measurements says.
LEAST_PER_BYTE = 1e-13
# A number that no session has.
_NONE = -1


def measure_hosts(world: World) -> Link | None:
    """The time of a copy from a device of this host to one of another: GPUs if both have some. None for one host.

    To be called in process 0. Raises the error of the other process too.
    """
    other = next((rank for rank, machine in enumerate(world.machines) if machine), None)
    if other is None:
        return None
    world.control.send(other, (Call(_take_part), None))
    link = fit(_measure(world, other, 0))
    return Link(link.latency, max(link.per_byte, LEAST_PER_BYTE))


def _take_part(world: World) -> None:
    attempt(lambda: _measure(world, world.rank, 1))  # process 0 gets the error


def _measure(world: World, other: int, place: int) -> list[tuple[int, float]]:
    """The seconds of a copy for each size, as seen by the process at place 0."""
    mail = MpiMail(world.mail, _NONE, (0, other))
    kinds = all_gather(mail, place, (0, 1), "cuda" if count_gpus() else "cpu")
    device = Device("cuda" if kinds == ["cuda", "cuda"] else "cpu", 0)
    backend = attempt(lambda: make_backend(ONNXRUNTIME, device, 1))
    told = backend if isinstance(backend, Failure) else None
    if isinstance(failure := all_gather(mail, place, (0, 1), told), Failure):
        raise failure.error
    backend.attach()
    end = Collectives(place, 2, mail, {}, backend, device.kind == "cuda")
    end.connect()
    return [(size, _one_way(place, end, backend, size)) for size in MESSAGE_BYTES]


def _one_way(place: int, end: Collectives, backend: Backend, size: int) -> float:
    """Half of the seconds of a round trip, minus the pause in which the other process is as busy as an engine."""
    value = backend.upload(np.zeros(size // 4, np.float32))
    trips: list[float] = []
    pauses: list[float] = []

    def pause() -> None:
        backend.wait_all()
        start = time.perf_counter()
        be_busy()
        pauses.append(time.perf_counter() - start)

    for _ in range(WARMUP + RUNS):
        start = time.perf_counter()
        value = bounce(place, end, value, pause)
        backend.wait_all()
        trips.append(time.perf_counter() - start)
    paused: list[float] = end.all_gather((0, 1), pauses)[1]
    there_and_back = [max(SHORTEST, trip - pause) for trip, pause in zip(trips, paused, strict=True)]
    return median(there_and_back[WARMUP:]) / 2
