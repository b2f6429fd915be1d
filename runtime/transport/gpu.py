"""Ranks that are threads of one process, some or all of them on GPUs: arrays go from GPU to GPU, ordered by events.

The host waits for nothing here. Sums are NCCL's where each rank of a group has a GPU of its own; two ranks on one GPU,
and groups of GPUs and CPU devices, sum on the host.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Optional

import numpy as np

from splitc.runtime.arrays import accumulate_arrays
from splitc.runtime.engines import Backend
from splitc.runtime.engines.gpu import Gpu
from splitc.runtime.errors import PackageError
from splitc.runtime.program import Failure, Reduce
from splitc.runtime.transport.local import LocalTransport

NCCL_TYPES = {
    "bfloat16": "NCCL_BFLOAT16",
    "float16": "NCCL_FLOAT16",
    "float32": "NCCL_FLOAT32",
    "float64": "NCCL_FLOAT64",
    "int8": "NCCL_INT8",
    "int32": "NCCL_INT32",
    "int64": "NCCL_INT64",
    "uint8": "NCCL_UINT8",
}
NCCL_OPERATIONS = {"sum": "NCCL_SUM", "max": "NCCL_MAX"}


@dataclass(frozen=True)
class Parcel:
    """An array on its way from a GPU, which is there once `ready` has happened; or its copy on the host."""

    value: Any
    gpu: int
    ready: Any


@dataclass
class Clique:
    """What the ranks of a group know together of their collectives.

    A rank that fails in a request can't take part in the rest of its collectives, in which the others would wait for
    ever. So it notes the request under `breaks`; they leave that request too, and later ones get a new communicator.
    `ids` are those of the communicators, one more after each break.
    """

    lock: threading.Lock = field(default_factory=threading.Lock)
    breaks: dict[int, Failure] = field(default_factory=dict)
    ids: dict[int, Any] = field(default_factory=dict)

    def generation(self, request: int) -> int:
        """How many breaks came before the request."""
        with self.lock:
            return sum(broken < request for broken in self.breaks)

    def id(self, generation: int, make: Callable[[], Any]) -> Any:
        """The id of a generation's communicator, made by whoever asks first."""
        with self.lock:
            if generation not in self.ids:
                self.ids[generation] = make()
            return self.ids[generation]


class GpuTransport(LocalTransport):
    """The end of a rank. `devices` are the GPUs of all ranks, None for a CPU device; `cliques` all ranks share.

    Pairs of GPUs in `by_host` exchange arrays through the host, since copies between them are not to be trusted.
    """

    def __init__(
        self,
        local: LocalTransport,
        backend: Backend,
        devices: Sequence[Optional[int]],
        cliques: dict[tuple[int, ...], Clique],
        by_host: frozenset[tuple[int, int]],
    ) -> None:
        super().__init__(local.rank, local.hub)
        self._backend = backend
        self._gpu = backend if isinstance(backend, Gpu) else None
        self._devices = devices
        self._cliques = cliques
        self.by_host = by_host
        self._request = -1
        self._communicators: dict[tuple[int, ...], tuple[int, Any]] = {}
        if self._gpu is not None:
            self._gpu.interrupted = self._why_stop

    def begin(self) -> None:
        self._request += 1

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
        gpus = [self._devices[rank] for rank in step.ranks]
        if None in gpus or len(set(gpus)) < len(gpus):
            return self._reduce_on_host(step, parts, accumulate)
        group = tuple(step.ranks)
        clique = self._cliques.setdefault(group, Clique())
        if isinstance(parts, Failure):
            with clique.lock:
                return clique.breaks.setdefault(self._request, parts)
        if (failure := clique.breaks.get(self._request)) is not None:
            return failure
        assert self._gpu is not None
        nccl = self._gpu.cuda.nccl
        communicator = self._communicator(group, clique)
        operation = getattr(nccl, NCCL_OPERATIONS[step.operation])
        nccl.groupStart()
        for part in parts:
            count, kind = math.prod(part.shape), getattr(nccl, NCCL_TYPES[part.dtype])
            communicator.allReduce(part.pointer, part.pointer, count, kind, operation, self._gpu.stream.ptr)
        nccl.groupEnd()
        return parts

    def _reduce_on_host(self, step: Reduce, parts: Any, accumulate: Callable[[str, Any, Any], None]) -> Any:
        if self._gpu is None and all(device is None for device in map(self._devices.__getitem__, step.ranks)):
            return super().reduce(step, parts, accumulate)
        if not isinstance(parts, Failure):
            landed = self._backend.download({str(number): part for number, part in enumerate(parts)})
            parts = list(landed.values())
        wholes = super().reduce(step, parts, accumulate_arrays)
        return wholes if isinstance(wholes, Failure) else [self._backend.upload(whole) for whole in wholes]

    def _communicator(self, group: tuple[int, ...], clique: Clique) -> Any:
        """The group's communicator for this request. All its ranks come here at the same time, and meet in NCCL."""
        generation = clique.generation(self._request)
        known, communicator = self._communicators.get(group, (-1, None))
        if known != generation:
            if communicator is not None:
                communicator.abort()
            nccl = need_nccl(self._gpu)
            number = clique.id(generation, nccl.get_unique_id)
            communicator = nccl.NcclCommunicator(len(group), number, group.index(self.rank))
            self._communicators[group] = generation, communicator
        return communicator

    def join(self, group: Sequence[int]) -> Any:
        """A communicator of the group for engines that exchange values themselves; all its ranks call this at once."""
        return self._communicator(tuple(group), self._cliques.setdefault(tuple(group), Clique()))

    def _why_stop(self) -> Optional[BaseException]:
        """Why this rank's GPU may never finish the request: another rank of a group has left it."""
        if self.hub.failure is not None:
            return self.hub.failure.error
        for group, (_, communicator) in list(self._communicators.items()):
            failure = self._cliques[group].breaks.get(self._request)
            if failure is not None:
                communicator.abort()  # else its kernels would wait on the GPU for ever
                del self._communicators[group]
                return failure.error
        return None


def need_nccl(gpu: Optional[Gpu]) -> Any:
    """CuPy's NCCL. Raises PackageError, with the package that brings it, where it is missing."""
    assert gpu is not None
    nccl = gpu.cuda.nccl
    if not nccl.available:
        raise PackageError(
            "sums over several GPUs need NCCL: pip install nvidia-nccl-cu12 (nvidia-nccl-cu13 with a driver of CUDA 13)"
        )
    return nccl


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
        gpus[source].wait(gpus[source].record())
        for target in gpus:
            if target != source:
                gpus[target].attach()
                arrived = gpus[target].download({"": gpus[target].copy_from(value, source)})[""]
                if not np.array_equal(arrived, PATTERN):
                    wrong.add((source, target))
    return frozenset(wrong)
