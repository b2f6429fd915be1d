"""Ranks that are threads of one process, some or all of them on GPUs: arrays go from GPU to GPU, ordered by events.

The host waits for nothing here. Sums are NCCL's where each rank of a group has a GPU of its own; two ranks on one GPU,
and groups of GPUs and CPU devices, sum on the host.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import permutations
from typing import Any, Optional

import numpy as np

from splitc.runtime.arrays import accumulate_arrays
from splitc.runtime.engines import Backend
from splitc.runtime.engines.gpu import Gpu, GpuArray
from splitc.runtime.program import Failure, Reduce, Step
from splitc.runtime.transport.local import LocalTransport
from splitc.runtime.transport.nccl import Clique, Collectives, Group


@dataclass(frozen=True)
class Parcel:
    """An array on its way from a GPU, which is there once `ready` has happened; or its copy on the host."""

    value: Any
    gpu: int
    ready: Any


@dataclass(frozen=True)
class Offer:
    """A rank's parts of a sum, for others to read once `ready` has happened."""

    parts: Sequence[GpuArray]
    ready: Any


class GpuTransport(LocalTransport):
    """The end of a rank. `devices` are the GPUs of all ranks, None for a CPU device; `cliques` all ranks share.

    Pairs of GPUs in `by_host` exchange arrays through the host, since copies between them are not to be trusted.
    `direct` says that all ranks are on GPUs that have access to each other's memory.
    """

    def __init__(
        self,
        local: LocalTransport,
        backend: Backend,
        devices: Sequence[Optional[int]],
        cliques: dict[Group, Clique],
        by_host: frozenset[tuple[int, int]],
        direct: bool,
    ) -> None:
        super().__init__(local.rank, local.hub)
        self._backend = backend
        self._gpu = backend if isinstance(backend, Gpu) else None
        self._devices = devices
        self.by_host = by_host
        self.direct = direct
        self._request = -1
        self._offered: dict[tuple[int, ...], Any] = {}
        self._collectives = None if self._gpu is None else Collectives(self.rank, self._gpu, cliques, self._meet)
        if self._gpu is not None:
            self._gpu.interrupted = self._why_stop

    def prepare(self, steps: Sequence[Step]) -> None:
        for group in dict.fromkeys(tuple(step.ranks) for step in steps if isinstance(step, Reduce)):
            if self._is_apart(group):
                self.join(group)

    def join(self, group: Sequence[int]) -> Any:
        assert self._collectives is not None and self._gpu is not None
        communicator = self._collectives.connect(group, self._request)
        if isinstance(communicator, Failure):
            raise communicator.error
        self._gpu.wait_all()
        return communicator

    def begin(self) -> None:
        self._request += 1

    def finish(self) -> None:
        # A rank that went on to the next request could not tell any more whether another one left this one.
        if self._gpu is not None and self._collectives is not None and self._collectives.any:
            self._gpu.wait_all()

    def leave(self) -> None:
        if self._collectives is not None:
            self._collectives.abort()

    def send(self, target: int, name: str, value: Any) -> None:
        super().send(target, name, value if isinstance(value, Failure) else self._give(value, self._devices[target]))

    def receive(self, source: int, name: str) -> Any:
        value = super().receive(source, name)
        return value if isinstance(value, Failure) else self._take(value)

    def _give(self, value: Any, target: Optional[int]) -> Any:
        if self._gpu is None:
            return np.asarray(self._backend.download({"": value})[""])
        if target is None or (self._gpu.index, target) in self.by_host:
            return self._gpu.download({"": value})[""]
        return Parcel(value, self._gpu.index, self._gpu.record())

    def _take(self, value: Any) -> Any:
        if not isinstance(value, Parcel):
            return self._backend.upload(value)
        assert self._gpu is not None, "what goes to a CPU device goes through the host"
        self._gpu.stream.wait_event(value.ready)
        # Also on one GPU: the sender's stream gets its memory back when this copy is done, not when all reads are.
        return self._gpu.copy_from(value.value, value.gpu)

    def reduce(self, step: Reduce, parts: Any, accumulate: Callable[[str, Any, Any], None]) -> Any:
        if self._gpu is not None and self._gpu.tape is not None:
            return self._reduce_in_graph(self._gpu, step, parts)
        if not self._is_apart(step.ranks):
            return self._reduce_on_host(step, parts, accumulate)
        assert self._collectives is not None
        return self._collectives.reduce(step, parts, self._request)

    def meet(self, ranks: Sequence[int], value: Any) -> Any:
        """What these ranks hand in, in their order, when all have done so; or the Failure that one handed in."""
        step = Reduce("sum", [], [], list(ranks))
        handed_in = value if isinstance(value, Failure) else [[value]]
        met = super().reduce(step, handed_in, lambda _, everyone, own: everyone.extend(own))
        return met if isinstance(met, Failure) else met[0]

    def _reduce_in_graph(self, gpu: Gpu, step: Reduce, parts: Any) -> Any:
        """Each rank reads the parts of all, when these are there. The host waits only while the graph is recorded."""
        offers = self.meet(step.ranks, parts if isinstance(parts, Failure) else Offer(parts, gpu.record()))
        if isinstance(offers, Failure):
            return offers
        for offer in offers:
            gpu.stream.wait_event(offer.ready)
        wholes = [gpu.combine(step.operation, column) for column in zip(*(offer.parts for offer in offers))]
        # The others have read what this rank offered before as soon as they offer the next: its memory may go only now.
        self._offered[tuple(step.ranks)] = parts
        return wholes

    def _is_apart(self, ranks: Sequence[int]) -> bool:
        """Whether each of the ranks has a GPU of its own, as NCCL wants it."""
        gpus = [self._devices[rank] for rank in ranks]
        return None not in gpus and len(set(gpus)) == len(gpus)

    def _meet(self, group: Sequence[int], failure: Optional[Failure]) -> Optional[Failure]:
        """Wait on the host for all ranks of a group."""
        met = self.meet(group, failure)
        return met if isinstance(met, Failure) else None

    def _reduce_on_host(self, step: Reduce, parts: Any, accumulate: Callable[[str, Any, Any], None]) -> Any:
        if self._gpu is None and all(device is None for device in map(self._devices.__getitem__, step.ranks)):
            return super().reduce(step, parts, accumulate)
        if not isinstance(parts, Failure):
            try:
                landed = self._backend.download({str(number): part for number, part in enumerate(parts)})
                parts = list(landed.values())
            except Exception as error:  # the others wait for what this rank hands in, whatever it is
                parts = Failure(error)
        wholes = super().reduce(step, parts, accumulate_arrays)
        return wholes if isinstance(wholes, Failure) else [self._backend.upload(whole) for whole in wholes]

    def _why_stop(self) -> Optional[BaseException]:
        """Why this rank's GPU may never finish the request."""
        assert self._collectives is not None
        if self.hub.failure is not None:
            self._collectives.abort()
            return self.hub.failure.error
        return self._collectives.why_stop(self._request)


# cudaErrorPeerAccessAlreadyEnabled: another session of this process did it.
ALREADY = 704
# A pattern that no copy of part of it, and no array of zeros, equals.
PATTERN = (np.arange(1 << 20, dtype=np.uint32) * np.uint32(2654435761)).view(np.uint8)


def check_copies(gpus: Mapping[int, Gpu]) -> frozenset[tuple[int, int]]:
    """The pairs of GPUs between which copies come out wrong, as they do on some machines; one array is sent each way.

    To be called before the ranks' threads start. Where GPUs can, they are let copy without the host.
    """
    wrong = set()
    _let_copy(gpus)
    for source in gpus:
        gpus[source].attach()
        value = gpus[source].upload(PATTERN)
        gpus[source].wait(gpus[source].record())
        for target in gpus:
            if target != source:
                gpus[target].attach()
                arrived = gpus[target].download({"": gpus[target].copy_from(value, source)})[""]
                if not np.array_equal(arrived, PATTERN):
                    wrong.add((source, target))
    return frozenset(wrong)


def have_access(gpus: Mapping[int, Gpu]) -> bool:
    """Whether each GPU has access to the memory of all others."""
    pairs = permutations(gpus, 2)
    return all(gpus[one].cuda.runtime.deviceCanAccessPeer(one, other) for one, other in pairs)


def _let_copy(gpus: Mapping[int, Gpu]) -> None:
    """Give each GPU access to the others' memory, where it can have it; else the driver copies through the host."""
    for one, gpu in gpus.items():
        gpu.attach()
        runtime = gpu.cuda.runtime
        for other in gpus:
            if other != one and runtime.deviceCanAccessPeer(one, other):
                try:
                    runtime.deviceEnablePeerAccess(other)
                except runtime.CUDARuntimeError as error:
                    if error.status != ALREADY:
                        raise
