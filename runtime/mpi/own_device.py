"""What a process that MPI has started uses of its machine: one GPU, or a share of the cores."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import psutil

from splitc.runtime.errors import PackageError
from splitc.runtime.hardware.devices import Device, bound_cores, cores
from splitc.runtime.hardware.gpus import count_gpus
from splitc.runtime.mpi.world import World


def own_device(world: World, devices: Sequence[Device]) -> Device:
    """This process's device among those of all ranks.

    If it sees one GPU alone, as Slurm may have it, that is the rank's. Otherwise it is the one that the rank's device
    names; if two ranks here name the same one, as those of several machines do, GPUs are given out in order. Raises
    PackageError if there are too few.
    """
    device = devices[world.rank]
    if device.kind == "cpu":
        return device
    ours = [rank for rank in world.here if devices[rank].kind == device.kind]
    named = [devices[rank].index for rank in ours]
    count = count_gpus()
    ordinal = device.index if len(set(named)) == len(named) and max(named) < count else ours.index(world.rank)
    if count == 1:
        ordinal = 0
    if ordinal >= count:
        raise PackageError(f"{len(ours)} ranks have a GPU here, and there are {count} GPUs")
    return replace(device, ordinal=ordinal)


def own_threads(world: World, devices: Sequence[Device]) -> int:
    """The threads of this process's CPU device: the cores that MPI has bound it to, or its share of the machine's."""
    ours = [rank for rank in world.here if devices[rank].kind == "cpu"]
    bound = len(bound_cores()) < (psutil.cpu_count() or 1)
    return max(1, cores() if bound else cores() // max(1, len(ours)))
