"""NCCL's communicators, for engines with collectives inside."""

from __future__ import annotations

import ctypes
import importlib
import math
import os
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from splitc.runtime.collectives.kernel_sums import KernelSums, connect_kernel_sums
from splitc.runtime.collectives.meeting import PATIENCE, Meeting, MeetingEnd, registered, release_with
from splitc.runtime.engines.operator_library import load_library
from splitc.runtime.engines.variables import set_workspace, use_xqa_for_good
from splitc.runtime.errors import EngineError, PackageError
from splitc.runtime.gpu.array import GpuArray
from splitc.runtime.gpu.device import GpuDevice
from splitc.runtime.threads.failures import Failure, attempt
from splitc.runtime.threads.futures import Executor

# NCCL's numbers of number types (ncclDataType_t) and of operations (ncclRedOp_t).
_TYPES = {
    "int8": 0,
    "uint8": 1,
    "int32": 2,
    "uint32": 3,
    "int64": 4,
    "uint64": 5,
    "float16": 6,
    "float32": 7,
    "float64": 8,
    "bfloat16": 9,
}
_BYTES = _TYPES["uint8"]
_SUM, _MAX = 0, 2
# The most channels between two ranks that send each other values. On two H200s 8 of them take 604 to 684 MiB of a GPU,
# and NCCL's 32 take 700 to 1,020; a value of 1 MiB takes 15 microseconds in place of 12, one of 16 MiB 125 for 56.
CHANNELS = 8


@dataclass(frozen=True)
class Connected:
    """An NCCL communicator, and the kernels for all-reduces inside engines; None without peer access."""

    communicator: Any
    kernels: KernelSums | None = None


class NcclCommunicator:
    """One rank's end of a communicator, which may still be connecting.

    A rank that is blocked in an NCCL reduction can't be cancelled by a failing peer.
    """

    capturable = True

    def __init__(self, connecting: Future[Connected]) -> None:
        self._connecting = connecting
        self._ends: list[int] = []
        # Where ranks agree on what they are about to send each other inside engines.
        self._meeting: MeetingEnd | None = None

    @property
    def pointer(self) -> int | None:
        return int(self._communicator.comm)

    @property
    def kernels(self) -> KernelSums | None:
        """See Connected."""
        return self._connecting.result().kernels

    @property
    def _communicator(self) -> Any:
        return self._connecting.result().communicator

    def meet(self, meeting: Meeting, place: int) -> None:
        """Let engines send and receive too. Ranks agree on each transfer in this meeting, at their places."""
        nccl, end = _load_nccl(), self._make_end()
        send, receive = _function(nccl.ncclSend), _function(nccl.ncclRecv)
        load_library().splitc_end_transfers(end, meeting.address, place, PATIENCE, send, receive)
        self._meeting = MeetingEnd(meeting, end)

    def _make_end(self) -> int:
        self._ends.append(load_library().splitc_end_of_nccl(_function(_load_nccl().ncclAllReduce)))
        release_with(self, self._ends[-1])
        return self._ends[-1]

    def all_reduce(self, operation: str, part: GpuArray, whole: GpuArray, stream: int) -> None:
        """Reduce an array over the ranks, on a stream."""
        kind, count = _elements(part)
        code = {"sum": _SUM, "max": _MAX}[operation]
        self._communicator.allReduce(part.pointer, whole.pointer, count, kind, code, stream)

    def send(self, value: GpuArray, target: int, stream: int) -> None:
        """Send an array to a rank of the communicator, which receives it."""
        self._communicator.send(value.pointer, value.nbytes, _BYTES, target, stream)

    def receive(self, value: GpuArray, source: int, stream: int) -> None:
        """Receive an array from a rank of the communicator."""
        self._communicator.recv(value.pointer, value.nbytes, _BYTES, source, stream)

    def registered(self) -> AbstractContextManager[Path]:
        return registered(self._make_end()) if self._meeting is None else self._meeting.registered()

    def connect(self) -> None:
        kernels = None if self.kernels is None else self.kernels.pointer
        for end in self._ends:
            load_library().splitc_end_connect(end, self.pointer, kernels)

    def begin(self, request: int) -> int:
        return 0 if self._meeting is None else self._meeting.begin(request)

    def check(self) -> None:
        if self.kernels is not None:
            self.kernels.check()

    def fail(self, run: int) -> bool:
        return self._meeting is not None and self._meeting.fail(run)

    def abort(self) -> None:
        """Abort its work, and release it."""
        self._communicator.abort()

    def close(self) -> None:
        """Close the memory of other GPUs that it has opened."""
        if self.kernels is not None:
            self.kernels.close()


class NcclCommunicators:
    """The communicators of one rank. `all_gather` is the method of its collectives."""

    def __init__(self, rank: int, all_gather: Callable[[Sequence[int], Any], Any]) -> None:
        self._rank = rank
        self._all_gather = all_gather
        self._made: list[tuple[tuple[int, ...], NcclCommunicator]] = []
        # One thread, so that all ranks connect in the same order.
        self._pool: Executor | None = None

    def create(self, group: Sequence[int], sums: bool = True) -> NcclCommunicator:
        """A communicator for the group. All of its ranks must call this at the same time.

        With `sums`, the connections for all-reduces are made now. Otherwise the first all-reduce would make them and
        block the host; but for ranks that only send values they would take 288 MiB of each GPU for nothing.

        Raises PackageError if NCCL is missing, and the error of any other rank.
        """
        _set_variables(sums)
        made: Future[Connected] = Future()
        made.set_result(Connected(self._connect(group)))
        return self._keep(group, made)

    def create_later(self, group: Sequence[int], gpu: GpuDevice, one_machine: bool) -> NcclCommunicator:
        """As `create`, on another thread, while engines load. On one machine, kernels do the all-reduces."""

        # Before the thread that reads variables, which must not be set meanwhile.
        _set_variables(sums=True)
        set_workspace()
        use_xqa_for_good(gpu.index)

        def connect() -> Connected:
            gpu.attach()
            made = self._connect(group)
            return Connected(
                made, connect_kernel_sums(gpu, group, self._rank, self._all_gather) if one_machine else None
            )

        self._pool = self._pool or Executor(1, "splitc connects")
        return self._keep(group, self._pool.submit(connect))

    def _keep(self, group: Sequence[int], connecting: Future[Connected]) -> NcclCommunicator:
        self._made.append((tuple(group), NcclCommunicator(connecting)))
        return self._made[-1][1]

    def _connect(self, group: Sequence[int]) -> Any:
        def name() -> Any:
            nccl = find_nccl()
            return nccl.get_unique_id() if self._rank == group[0] else None

        # NCCL blocks until all ranks of a communicator have come, so no rank may begin if one of them can't.
        known = self._all_gather(group, attempt(name))
        if isinstance(known, Failure):
            raise known.error
        return find_nccl().NcclCommunicator(len(group), known[0], list(group).index(self._rank))

    def find(self, group: Sequence[int]) -> NcclCommunicator | None:
        """The communicator of the group; None if there is none."""
        return next((made for ranks, made in self._made if ranks == tuple(group)), None)

    def close(self) -> None:
        """Release the communicators in a process that continues. All ranks must call this at the same time.

        The ranks wait for each other, so that no memory is freed that another rank still writes to, and NCCL does not
        block when Python drops a communicator.
        """
        for group, made in self._made:
            self._all_gather(group, None)
            made.close()
            self._all_gather(group, None)
        self.abort()
        if self._pool is not None:
            self._pool.shutdown()

    def abort(self) -> None:
        """Abort the communicators' work, and release them."""
        while self._made:
            self._made.pop()[1].abort()


def _load_nccl() -> ctypes.CDLL:
    """NCCL's library. Raises PackageError if it can't be loaded."""
    # CuPy must load it first, by its path: the name alone may find another version, which other ranks refuse.
    find_nccl()
    try:
        return ctypes.CDLL("libnccl.so.2")
    except OSError as error:
        raise PackageError(f"NCCL, which sums inside engines, can't be loaded: {error}") from error


def _function(function: Any) -> ctypes.c_void_p:
    """The address of a C function."""
    return ctypes.cast(function, ctypes.c_void_p)


def _elements(value: GpuArray) -> tuple[int, int]:
    """NCCL's number type of an array, and the number of its elements. Raises EngineError for other types."""
    if value.dtype not in _TYPES:
        raise EngineError(f"NCCL can't add up {value.dtype}")
    return _TYPES[value.dtype], math.prod(value.shape)


def find_nccl() -> Any:
    """CuPy's NCCL module. Raises PackageError, which names the package to install, if NCCL is missing."""
    nccl = importlib.import_module("cupy.cuda.nccl")
    if not nccl.available:
        raise PackageError(
            "these engines sum over GPUs by NCCL: pip install nvidia-nccl-cu12 (or -cu13, with a driver of CUDA 13)"
        )
    return nccl


def _set_variables(sums: bool) -> None:
    os.environ.setdefault("NCCL_MAX_P2P_NCHANNELS", str(CHANNELS))
    if sums:
        os.environ.setdefault("NCCL_RUNTIME_CONNECT", "0")
