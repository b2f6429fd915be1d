"""NCCL's communicators, for engines that exchange values with other ranks' while they run."""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable, Sequence
from typing import Any

from splitc.runtime.errors import PackageError
from splitc.runtime.failures import Failure, attempt


class NcclCommunicators:
    """The communicators of one rank. `all_gather` is that of its collectives."""

    def __init__(self, rank: int, all_gather: Callable[[Sequence[int], Any], Any]) -> None:
        self._rank = rank
        self._all_gather = all_gather
        self._made: list[Any] = []

    def create(self, group: Sequence[int]) -> Any:
        """A communicator of the ranks of the group, all of which call this at the same time.

        Raises PackageError where NCCL is missing, and what another rank failed with.
        """

        def name() -> Any:
            nccl = find_nccl()
            return nccl, nccl.get_unique_id() if self._rank == group[0] else None

        # Who makes a communicator waits for all others: none begins when one can't.
        known = self._all_gather(group, attempt(name))
        if isinstance(known, Failure):
            raise known.error
        nccl, unique = known[0]
        self._made.append(nccl.NcclCommunicator(len(group), unique, list(group).index(self._rank)))
        return self._made[-1]

    def abort(self) -> None:
        """End what the communicators do, and let them go."""
        while self._made:
            self._made.pop().abort()


def find_nccl() -> Any:
    """CuPy's NCCL. Raises PackageError, with the package that brings it, where it is missing."""
    nccl = importlib.import_module("cupy.cuda.nccl")
    if not nccl.available:
        raise PackageError(
            "these engines sum over GPUs by NCCL: pip install nvidia-nccl-cu12 (or -cu13, with a driver of CUDA 13)"
        )
    # All connections when a communicator is made, and not in the first collective, which would make the host wait.
    os.environ.setdefault("NCCL_RUNTIME_CONNECT", "0")
    return nccl
