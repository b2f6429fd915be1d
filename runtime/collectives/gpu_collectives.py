"""Collectives of threads of one process, with some or all ranks on GPUs: arrays are copied between GPUs, by events.

Copies between GPUs never make the host wait. Groups of GPUs with peer access sum on the GPUs (`peer_all_reduce`). Other
groups, and those with CPU devices, sum on the host.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from itertools import permutations
from typing import Any

import numpy as np

from splitc.runtime.arrays import accumulate_arrays
from splitc.runtime.collectives.host import HostCollectives, connect
from splitc.runtime.collectives.nccl import NcclCommunicators
from splitc.runtime.collectives.peer_access import check_copies, enable_peer_access
from splitc.runtime.collectives.peer_all_reduce import PeerAllReduce
from splitc.runtime.devices import Device
from splitc.runtime.engines import Backend, Communicator
from splitc.runtime.engines.gpu_device import GpuDevice
from splitc.runtime.executor import Executor
from splitc.runtime.failures import Failure, attempt
from splitc.runtime.steps import Reduce


@dataclass(frozen=True)
class Parcel:
    """An array on its way from a GPU. It is computed once the event `ready` has completed."""

    value: Any
    gpu: int
    ready: Any


class GpuCollectives(HostCollectives):
    """The end of one rank. `places` are the GPUs of all ranks, None for a CPU device.

    `links` are the pairs of GPUs of which the first has access to the second's memory. Pairs in `by_host` copy through
    the host, since direct copies between them give wrong results.
    """

    def __init__(
        self,
        host: HostCollectives,
        backend: Backend,
        places: Sequence[int | None],
        links: Collection[tuple[int, int]],
        by_host: frozenset[tuple[int, int]],
    ) -> None:
        super().__init__(host.rank, host.hub)
        self._backend = backend
        self._gpu = backend if isinstance(backend, GpuDevice) else None
        self._places = places
        self._links = links
        self.by_host = by_host
        self.capturable = self._are_peers(range(len(places)))
        self._communicators = NcclCommunicators(host.rank, host.all_gather)
        self._peers: PeerAllReduce | None = None
        if self._gpu is not None:
            self._peers = PeerAllReduce(self._gpu, host.rank, host.all_gather)
            self._gpu.interrupted = self._why_stop

    def create_communicator(self, group: Sequence[int], uses_operators: bool) -> Communicator:
        # Threads of one process that call NCCL inside engines may wait for each other for ever, so operators meet on
        # the host.
        return self.meet(group, self._gpu) if uses_operators else self._communicators.create(group)

    def close(self) -> None:
        self._communicators.abort()

    def send(self, target: int, name: str, value: Any) -> None:
        super().send(target, name, value if isinstance(value, Failure) else self._give(value, self._places[target]))

    def receive(self, source: int, name: str) -> Any:
        value = super().receive(source, name)
        return value if isinstance(value, Failure) else self._take(value)

    def _give(self, value: Any, target: int | None) -> Any:
        if self._gpu is None:
            return np.asarray(self._backend.download({"": value})[""])
        if target is None or (self._gpu.index, target) in self.by_host:
            return self._gpu.download({"": value})[""]
        return Parcel(value, self._gpu.index, self._gpu.record())

    def _take(self, value: Any) -> Any:
        if not isinstance(value, Parcel):
            return self._backend.upload(value)
        assert self._gpu is not None, "values for a CPU device are sent through the host"
        self._gpu.stream.wait_event(value.ready)
        # Copy even on the same GPU: then the sender's memory can be reused after this copy, not after all reads.
        return self._gpu.copy_from(value.value, value.gpu)

    def all_reduce(self, step: Reduce, parts: Any, accumulate: Callable[[str, Any, Any], None]) -> Any:
        if self._peers is not None and self._are_peers(step.ranks):
            return self._peers.run(step, parts)
        if self._gpu is None and all(self._places[rank] is None for rank in step.ranks):
            return super().all_reduce(step, parts, accumulate)
        return self._all_reduce_on_host(step, parts)

    def _all_reduce_on_host(self, step: Reduce, parts: Any) -> Any:
        """Copy parts to the host, reduce them there, and copy the results to the devices."""
        if not isinstance(parts, Failure):
            arrays = attempt(lambda: self._backend.download({str(number): part for number, part in enumerate(parts)}))
            parts = arrays if isinstance(arrays, Failure) else list(arrays.values())
        wholes = super().all_reduce(step, parts, accumulate_arrays)
        return wholes if isinstance(wholes, Failure) else [self._backend.upload(whole) for whole in wholes]

    def _are_peers(self, ranks: Sequence[int]) -> bool:
        """Whether all of the ranks are on GPUs with peer access to each other."""
        gpus = {self._places[rank] for rank in ranks}
        return None not in gpus and all(pair in self._links for pair in permutations(gpus, 2))

    def _why_stop(self) -> BaseException | None:
        """The error why this rank's GPU may never finish the request, or None. Aborts the communicators."""
        if self.hub.failure is None:
            return None
        self.close()
        return self.hub.failure.error


def connect_devices(devices: Sequence[Device], backends: Sequence[Backend]) -> list[GpuCollectives]:
    """The ends of ranks of which some or all are on GPUs."""
    gpus = {backend.index: backend for backend in backends if isinstance(backend, GpuDevice)}
    with Executor(1) as pool:  # CuPy's current device is per thread: the caller's must not change
        links = pool.submit(enable_peer_access, gpus).result()
        by_host = pool.submit(check_copies, gpus).result()
    places = [backend.index if isinstance(backend, GpuDevice) else None for backend in backends]
    return [
        GpuCollectives(host, backend, places, links - by_host, by_host)
        for host, backend in zip(connect(len(devices)), backends, strict=True)
    ]
