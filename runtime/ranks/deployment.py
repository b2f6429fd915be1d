"""The settings that all ranks of a session share, and each one's share of a container's memory."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from splitc.runtime.errors import PackageError
from splitc.runtime.hardware.control_groups import memory_limit
from splitc.runtime.hardware.devices import Device
from splitc.runtime.package.manifest import Manifest
from splitc.runtime.units import format_bytes


@dataclass(frozen=True)
class Deployment:
    """A package on devices, one for each rank: of all replicas, or of one.

    - `threads`: the number for each CPU device; 0 lets the ranks choose.
    - `cuda_graphs`: whether requests on GPUs are replayed where possible.
    - `shares`: what each rank's engines may take of a container's memory: see `divide_container`.
    - `first`: the number in the session of the first of these ranks.
    - `all_devices`: the devices of all replicas.
    """

    package: Path
    manifest: Manifest
    devices: Sequence[Device]
    threads: int
    cuda_graphs: bool
    shares: Sequence[int | None]
    all_devices: Sequence[Device]
    first: int = 0

    def replicas(self) -> list[Deployment]:
        """Those of all replicas, one each."""
        size = len(self.manifest.ranks)
        groups = [slice(first, first + size) for first in range(0, len(self.devices), size)]
        return [replace(self, devices=self.devices[of], shares=self.shares[of], first=of.start) for of in groups]


# What a rank's process takes before it loads an engine, if it has not begun: 16 MiB as measured, and some more.
PROCESS = 20 << 20


def divide_container(
    manifest: Manifest, devices: Sequence[Device], here: Collection[int], to_begin: bool = False
) -> list[int | None]:
    """What each rank's engines may take of the memory that is free here. None for GPUs, and without a limit.

    `devices` are those of all replicas' ranks, `here` the numbers of ranks in this container. They get what they need
    to load, and of the rest as much as requests are predicted to need on them, in proportion. With `to_begin`, their
    processes are yet to begin. Raises PackageError if they can't be loaded: the system would end the process.
    """
    ours = [number for number in here if devices[number].kind == "cpu"]
    free, ranks = memory_limit()[1], manifest.ranks
    shares: list[int | None] = [None] * len(devices)
    if math.isinf(free) or not ours:
        return shares
    of = {number: ranks[number % len(ranks)] for number in ours}
    if (needed := sum(rank.loaded_bytes + to_begin * PROCESS for rank in of.values())) > free:
        raise PackageError(
            f"the ranks here need {format_bytes(needed)} to be loaded, and {format_bytes(int(free))} is free in this "
            "container: give it more memory, use more hosts, or leave weights in their files (--weights-at disk)"
        )
    planned = [size for replica in manifest.replicas for size in replica.total_bytes]
    if len(planned) != len(devices):
        planned = [rank.total_bytes for rank in ranks] * (len(devices) // len(ranks))
    running = {number: max(1, planned[number] - rank.loaded_bytes) for number, rank in of.items()}
    for number, rank in of.items():
        rest = (free - needed) * running[number] / sum(running.values())
        shares[number] = int(rank.loaded_bytes - rank.engine_bytes + rest)
    return shares
