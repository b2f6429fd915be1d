"""Sums over GPUs by NCCL, in which a rank that fails releases the others.

NCCL itself waits for ever for a rank that does not come: on the host while a communicator is made, and on the GPU in
each collective. So ranks meet on the host before they make one, and whoever hands in a failure there keeps all out of
it. A rank that fails later notes that; the others see it while they wait for their GPUs, and abort. The communicator is
then lost, and another one is made for the next request.
"""

from __future__ import annotations

import importlib
import math
import os
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Optional, Union

from splitc.runtime.engines.gpu import Gpu, GpuArray
from splitc.runtime.errors import EngineError, PackageError
from splitc.runtime.program import Failure, Reduce

TYPES = {
    "bfloat16": "NCCL_BFLOAT16",
    "float16": "NCCL_FLOAT16",
    "float32": "NCCL_FLOAT32",
    "float64": "NCCL_FLOAT64",
    "int8": "NCCL_INT8",
    "int32": "NCCL_INT32",
    "int64": "NCCL_INT64",
    "uint8": "NCCL_UINT8",
}
OPERATIONS = {"sum": "NCCL_SUM", "max": "NCCL_MAX"}

Group = tuple[int, ...]
# Waits for all ranks of a group; any rank's failure is what all get.
Meet = Callable[[Group, Optional[Failure]], Optional[Failure]]


@dataclass
class Clique:
    """What the ranks of a group know together.

    `breaks` are the requests that a rank left, so that the others had to leave them too. After each of them there is
    another communicator, whose ids are in `ids`.
    """

    lock: threading.Lock = field(default_factory=threading.Lock)
    breaks: dict[int, Failure] = field(default_factory=dict)
    ids: dict[int, Any] = field(default_factory=dict)

    def generation(self, request: int) -> int:
        """How many breaks came before the request. All ranks see the same: none ends a request that was left."""
        with self.lock:
            return sum(broken < request for broken in self.breaks)

    def leave(self, request: int, failure: Failure) -> Failure:
        """Note that a rank has left a request. Returns the failure of the first that did."""
        with self.lock:
            return self.breaks.setdefault(request, failure)

    def id(self, generation: int, make: Callable[[], Any]) -> Any:
        """The id of a generation's communicator, made by whoever asks first."""
        with self.lock:
            if generation not in self.ids:
                self.ids[generation] = make()
            return self.ids[generation]


def find_nccl() -> Any:
    """CuPy's NCCL. Raises PackageError, with the package that brings it, where it is missing."""
    nccl = importlib.import_module("cupy.cuda.nccl")
    if not nccl.available:
        raise PackageError(
            "sums over several GPUs need NCCL: pip install nvidia-nccl-cu12 (nvidia-nccl-cu13 with a driver of CUDA 13)"
        )
    return nccl


class Collectives:
    """One rank's communicators, one for each group that it is in."""

    def __init__(self, rank: int, gpu: Gpu, cliques: dict[Group, Clique], meet: Meet) -> None:
        self._rank = rank
        self._gpu = gpu
        self._cliques = cliques
        self._meet = meet
        self._known: dict[Group, tuple[int, Any]] = {}

    @property
    def any(self) -> bool:
        """Whether it has taken part in one."""
        return bool(self._known)

    def connect(self, group: Sequence[int], request: int, failure: Optional[Failure] = None) -> Union[Any, Failure]:
        """The group's communicator for a request. All its ranks ask for it at the same time.

        Where it is yet to be made, a rank may hand in a failure; all get that then, and none is made.
        """
        key = tuple(group)
        clique = self._cliques.setdefault(key, Clique())
        generation = clique.generation(request)
        known, communicator = self._known.get(key, (-1, None))
        if known == generation:
            return communicator
        if (failed := self._meet(key, failure)) is not None:
            return failed
        nccl = find_nccl()
        # All connections at once, and not in the first collective, which would wait for them on the host.
        os.environ.setdefault("NCCL_RUNTIME_CONNECT", "0")
        number = clique.id(generation, nccl.get_unique_id)
        communicator = nccl.NcclCommunicator(len(key), number, key.index(self._rank))
        self._known[key] = generation, communicator
        self._enqueue(nccl, communicator, "sum", [self._gpu.empty((1,), "float32")])
        return communicator

    def reduce(self, step: Reduce, parts: Union[Failure, list[GpuArray]], request: int) -> Union[Failure, list[Any]]:
        """Enqueue the sums of a step, in place; or leave the request, with this rank's failure or another's."""
        group = tuple(step.ranks)
        clique = self._cliques.setdefault(group, Clique())
        if (noted := clique.breaks.get(request)) is not None:
            return self._leave(group, request, noted)
        communicator = self.connect(group, request, parts if isinstance(parts, Failure) else None)
        if isinstance(communicator, Failure):
            return communicator
        if isinstance(parts, Failure):
            return self._leave(group, request, parts)
        try:
            self._enqueue(find_nccl(), communicator, step.operation, parts)
        except Exception as error:  # the others must not wait for what was not enqueued
            return self._leave(group, request, Failure(error))
        return parts

    def why_stop(self, request: int) -> Optional[BaseException]:
        """Why this rank's GPU will never finish the request: another rank of a group has left it."""
        for group in list(self._known):
            if (failure := self._cliques[group].breaks.get(request)) is not None:
                return self._leave(group, request, failure).error
        return None

    def abort(self) -> None:
        """End all that waits on this rank's GPU for other ranks."""
        for _, communicator in self._known.values():
            communicator.abort()
        self._known.clear()

    def _leave(self, group: Group, request: int, failure: Failure) -> Failure:
        """Leave a request, and take this rank's kernels off its GPU, which would wait there for ever."""
        noted = self._cliques[group].leave(request, failure)
        _, communicator = self._known.pop(group, (0, None))
        if communicator is not None:
            communicator.abort()
        return noted

    def _enqueue(self, nccl: Any, communicator: Any, operation: str, parts: Sequence[GpuArray]) -> None:
        if unknown := [part.dtype for part in parts if part.dtype not in TYPES]:
            raise EngineError(f"NCCL can't sum {unknown[0]}")
        kinds = [getattr(nccl, TYPES[part.dtype]) for part in parts]
        nccl.groupStart()
        try:
            for part, kind in zip(parts, kinds):
                size, how = math.prod(part.shape), getattr(nccl, OPERATIONS[operation])
                communicator.allReduce(part.pointer, part.pointer, size, kind, how, self._gpu.stream.ptr)
        finally:
            nccl.groupEnd()
