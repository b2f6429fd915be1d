"""Ranks that are threads of one process, some or all of them on GPUs: arrays go from GPU to GPU, ordered by events.

The host waits for no GPU here. Where GPUs have access to each other's memory, each reads the others' parts of a sum by
itself: a rank that fails says so when the ranks' threads meet, and no GPU waits for what will not come. Other groups,
and those with CPU devices, sum on the host.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise, permutations
from typing import Any

import numpy as np

from splitc.runtime.arrays import accumulate_arrays
from splitc.runtime.collectives.host import LocalTransport
from splitc.runtime.collectives.nccl import find_nccl
from splitc.runtime.engines import Backend
from splitc.runtime.engines.gpu_array import GpuArray
from splitc.runtime.engines.gpu_backend import Gpu
from splitc.runtime.failures import Failure, attempt
from splitc.runtime.steps import Reduce


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


# Bytes from which on a sum over more than two GPUs is worth a second step.
LARGE = 1 << 20
# Bytes that slices begin at multiples of.
ALIGNED = 256


def slices(array: GpuArray, count: int) -> list[GpuArray]:
    """The array's elements in so many pieces, of which the last may be smaller, or empty."""
    size = math.prod(array.shape)
    width = array.nbytes // size if size else 1
    step = -(-size // count)
    step = -(-step * width // ALIGNED) * ALIGNED // width
    starts = [min(size, number * step) for number in range(count + 1)]
    return [
        GpuArray(array.pointer + start * width, (end - start,), array.dtype, array.owner)
        for start, end in pairwise(starts)
    ]


class GpuTransport(LocalTransport):
    """The end of a rank. `devices` are the GPUs of all ranks, None for a CPU device.

    `links` are the pairs of GPUs of which the first has access to the second's memory. Pairs in `by_host` exchange
    arrays through the host, since copies between them are not to be trusted.
    """

    def __init__(
        self,
        local: LocalTransport,
        backend: Backend,
        devices: Sequence[int | None],
        links: Collection[tuple[int, int]],
        by_host: frozenset[tuple[int, int]],
    ) -> None:
        super().__init__(local.rank, local.hub)
        self._backend = backend
        self._gpu = backend if isinstance(backend, Gpu) else None
        self._devices = devices
        self._links = links
        self.by_host = by_host
        self.direct = self._is_direct(range(len(devices)))
        self._offered: dict[tuple[int, ...], Any] = {}
        self._communicators: list[Any] = []
        if self._gpu is not None:
            self._gpu.interrupted = self._why_stop

    def join(self, group: Sequence[int]) -> Any:
        def name() -> Any:
            nccl = find_nccl()
            return nccl, nccl.get_unique_id() if self.rank == group[0] else None

        # Who makes a communicator waits for all others: none begins when one can't.
        known = self.meet(group, attempt(name))
        if isinstance(known, Failure):
            raise known.error
        nccl, unique = known[0]
        self._communicators.append(nccl.NcclCommunicator(len(group), unique, list(group).index(self.rank)))
        return self._communicators[-1]

    def leave(self) -> None:
        while self._communicators:
            self._communicators.pop().abort()

    def send(self, target: int, name: str, value: Any) -> None:
        super().send(target, name, value if isinstance(value, Failure) else self._give(value, self._devices[target]))

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
        assert self._gpu is not None, "what goes to a CPU device goes through the host"
        self._gpu.stream.wait_event(value.ready)
        # Also on one GPU: the sender's stream gets its memory back when this copy is done, not when all reads are.
        return self._gpu.copy_from(value.value, value.gpu)

    def reduce(self, step: Reduce, parts: Any, accumulate: Callable[[str, Any, Any], None]) -> Any:
        if self._gpu is not None and self._is_direct(step.ranks):
            return self._reduce_directly(self._gpu, step, parts)
        return self._reduce_on_host(step, parts, accumulate)

    def meet(self, ranks: Sequence[int], value: Any) -> Any:
        """What these ranks hand in, in their order, when all have done so; or the Failure that one handed in."""
        step = Reduce("sum", [], [], list(ranks))
        handed_in = value if isinstance(value, Failure) else [[value]]
        met = super().reduce(step, handed_in, lambda _, everyone, own: everyone.extend(own))
        return met if isinstance(met, Failure) else met[0]

    def _reduce_directly(self, gpu: Gpu, step: Reduce, parts: Any) -> Any:
        """Each rank reads the parts of all when these are made. Their threads meet only to say where they will be."""
        own = parts if isinstance(parts, Failure) else attempt(lambda: Offer(parts, gpu.record()))
        offers = self.meet(step.ranks, own)
        if isinstance(offers, Failure):
            return offers
        for offer in offers:
            gpu.stream.wait_event(offer.ready)
        # The others have read what this rank offered before when they offer the next: its memory may go only now.
        self._offered[tuple(step.ranks)] = parts
        columns = list(zip(*(offer.parts for offer in offers)))
        if len(offers) > 2 and sum(part.nbytes for part in parts) >= LARGE:
            return self._combine_in_slices(gpu, step, columns)
        return attempt(lambda: _combine(gpu, step.operation, columns))

    def _combine_in_slices(self, gpu: Gpu, step: Reduce, columns: Sequence[Sequence[GpuArray]]) -> Any:
        """Each rank combines a slice, and takes the others' slices from them: 2 (n - 1) / n of the bytes, not n - 1.

        That is the two-step all-reduce: a reduce-scatter, and an all-gather.
        """
        count, place = len(step.ranks), list(step.ranks).index(self.rank)
        own = attempt(lambda: Offer(_combine(gpu, step.operation, columns, (place, count)), gpu.record()))
        offers = self.meet(step.ranks, own)
        if isinstance(offers, Failure):
            return offers
        wholes = offers[place].parts
        for offer in offers:
            gpu.stream.wait_event(offer.ready)
        for number, whole in enumerate(wholes):
            pieces = zip(slices(whole, count), (slices(offer.parts[number], count) for offer in offers))
            for other, (target, made) in enumerate(pieces):
                if other != place:
                    gpu.copy_over(target, made[other])
        self._offered[tuple(step.ranks)] = [self._offered[tuple(step.ranks)], wholes]
        return wholes

    def _is_direct(self, ranks: Sequence[int]) -> bool:
        """Whether all of the ranks are on GPUs that can read each other's memory."""
        gpus = {self._devices[rank] for rank in ranks}
        return None not in gpus and all(pair in self._links for pair in permutations(gpus, 2))

    def _reduce_on_host(self, step: Reduce, parts: Any, accumulate: Callable[[str, Any, Any], None]) -> Any:
        if self._gpu is None and all(device is None for device in map(self._devices.__getitem__, step.ranks)):
            return super().reduce(step, parts, accumulate)
        if not isinstance(parts, Failure):
            landed = attempt(lambda: self._backend.download({str(number): part for number, part in enumerate(parts)}))
            parts = landed if isinstance(landed, Failure) else list(landed.values())
        wholes = super().reduce(step, parts, accumulate_arrays)
        return wholes if isinstance(wholes, Failure) else [self._backend.upload(whole) for whole in wholes]

    def _why_stop(self) -> BaseException | None:
        """Why this rank's GPU may never finish the request."""
        if self.hub.failure is None:
            return None
        self.leave()
        return self.hub.failure.error


def _combine(
    gpu: Gpu, operation: str, columns: Sequence[Sequence[GpuArray]], piece: tuple[int, int] | None = None
) -> list[GpuArray]:
    """The wholes of the columns' parts; where a piece is asked for, only that one of so many is filled."""
    wholes = [gpu.empty(column[0].shape, column[0].dtype) for column in columns]
    for column, whole in zip(columns, wholes):
        arrays = [*column, whole]
        if piece is not None:
            arrays = [slices(each, piece[1])[piece[0]] for each in arrays]
        gpu.combine(operation, arrays[:-1], arrays[-1])
    return wholes


# cudaErrorPeerAccessAlreadyEnabled: another session of this process did it.
ALREADY = 704
# A pattern that no copy of part of it, and no array of zeros, equals.
PATTERN = (np.arange(1 << 20, dtype=np.uint32) * np.uint32(2654435761)).view(np.uint8)


def check_copies(gpus: Mapping[int, Gpu]) -> frozenset[tuple[int, int]]:
    """The pairs of GPUs between which copies come out wrong, as they do on some machines; one array is sent each way.

    To be called before the ranks' threads start.
    """
    wrong = set()
    for source in gpus:
        gpus[source].attach()
        value = gpus[source].upload(PATTERN)
        gpus[source].wait_all()
        for target in gpus:
            if target != source:
                gpus[target].attach()
                arrived = gpus[target].download({"": gpus[target].copy_from(value, source)})[""]
                if not np.array_equal(arrived, PATTERN):
                    wrong.add((source, target))
    return frozenset(wrong)


def let_copy(gpus: Mapping[int, Gpu]) -> frozenset[tuple[int, int]]:
    """Give each GPU access to the others' memory, where it can have it; else the driver copies through the host.

    Returns the pairs of which the first has access to the second's. To be called before `check_copies`.
    """
    links = set()
    for one, gpu in gpus.items():
        gpu.attach()
        runtime = gpu.cuda.runtime
        for other in gpus:
            if other != one and runtime.deviceCanAccessPeer(one, other):
                links.add((one, other))
                try:
                    runtime.deviceEnablePeerAccess(other)
                except runtime.CUDARuntimeError as error:
                    if error.status != ALREADY:
                        raise
    return frozenset(links)
