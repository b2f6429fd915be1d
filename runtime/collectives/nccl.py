"""NCCL's communicators, for engines with collectives inside."""

from __future__ import annotations

import ctypes
import importlib
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from splitc.runtime.collectives.engine_meeting import registered
from splitc.runtime.engines.operator_library import load_library
from splitc.runtime.errors import PackageError
from splitc.runtime.failures import Failure, attempt


class NcclCommunicator:
    """One rank's end of a communicator of NCCL's. A rank that fails can't tell the others' GPUs."""

    def __init__(self, communicator: Any) -> None:
        self._communicator = communicator
        self.pointer: int | None = communicator.comm

    @contextmanager
    def registered(self) -> Iterator[Path]:
        # CuPy has loaded the library, which is found by its name.
        function = ctypes.cast(ctypes.CDLL("libnccl.so.2").ncclAllReduce, ctypes.c_void_p)
        with registered(load_library().splitc_end_of_nccl(function, self.pointer)) as path:
            yield path

    def begin(self) -> None:
        pass

    def fail(self) -> bool:
        return False

    def abort(self) -> None:
        """Abort its work, and release it."""
        self._communicator.abort()


class NcclCommunicators:
    """The communicators of one rank. `all_gather` is the method of its collectives."""

    def __init__(self, rank: int, all_gather: Callable[[Sequence[int], Any], Any]) -> None:
        self._rank = rank
        self._all_gather = all_gather
        self._made: list[NcclCommunicator] = []

    def create(self, group: Sequence[int]) -> NcclCommunicator:
        """A communicator for the group. All of its ranks must call this at the same time.

        Raises PackageError if NCCL is missing, and the error of any other rank.
        """

        def name() -> Any:
            nccl = find_nccl()
            return nccl, nccl.get_unique_id() if self._rank == group[0] else None

        # NCCL waits for all ranks of a communicator, so no rank may begin if one of them can't.
        known = self._all_gather(group, attempt(name))
        if isinstance(known, Failure):
            raise known.error
        nccl, unique = known[0]
        self._made.append(NcclCommunicator(nccl.NcclCommunicator(len(group), unique, list(group).index(self._rank))))
        return self._made[-1]

    def abort(self) -> None:
        """Abort the communicators' work, and release them."""
        while self._made:
            self._made.pop().abort()


def find_nccl() -> Any:
    """CuPy's NCCL module. Raises PackageError, which names the package to install, if NCCL is missing."""
    nccl = importlib.import_module("cupy.cuda.nccl")
    if not nccl.available:
        raise PackageError(
            "these engines sum over GPUs by NCCL: pip install nvidia-nccl-cu12 (or -cu13, with a driver of CUDA 13)"
        )
    # Connect when a communicator is created. Otherwise the first collective does, and makes the host wait.
    os.environ.setdefault("NCCL_RUNTIME_CONNECT", "0")
    return nccl
