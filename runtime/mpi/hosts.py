"""MPI's hosts: whether they are those that a package was planned for, and what each process uses of its own."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import psutil

from splitc.runtime.errors import PackageError
from splitc.runtime.hardware.devices import Device, bound_cores, cores
from splitc.runtime.hardware.gpus import GpuIdentity, count_gpus
from splitc.runtime.mpi.world import World
from splitc.runtime.package.files import files_of
from splitc.runtime.package.manifest import Manifest
from splitc.runtime.package.manifest_file import FILE_NAME
from splitc.runtime.units import format_bytes


@dataclass(frozen=True)
class Finding:
    """The properties of a rank's host, the machine with this number. `gpu` is None on CPU devices."""

    host: str
    machine: int
    library: str
    gpu: GpuIdentity | None
    needed_bytes: int


def why_not_placed(devices: Sequence[Device], machines: Sequence[int], hosts: Sequence[str]) -> str | None:
    """Why ranks on these machines are not placed as planned: one planned host's ranks are on several machines.

    Several planned hosts may be one machine, and devices without a host are on any.
    """
    first: dict[int, int] = {}
    for rank, device in enumerate(devices):
        if device.host is not None:
            other = first.setdefault(device.host, rank)
            if machines[other] != machines[rank]:
                count = sum(planned.host == device.host for planned in devices)
                actual = ",".join(f"host{on}/{planned.local}" for on, planned in zip(machines, devices, strict=True))
                return (
                    f"the package was planned with ranks {other} and {rank} on one host (host{device.host}), and MPI "
                    f"started rank {other} on {hosts[other]} and rank {rank} on {hosts[rank]}: start {count} processes "
                    "there, in the order of the ranks (mpirun -hosts node1:4,node2:4, for Open MPI --host), or name "
                    f"the devices as they are (-d): {actual}"
                )
    return None


def why_lacking(package: Path, manifest: Manifest | None, rank: int) -> str | None:
    """The file of a rank that this host lacks; None if none is missing. Without `manifest`, checks only its file."""
    names = [FILE_NAME] if manifest is None else [file.path for file in files_of(manifest, rank)]
    lacking = next((name for name in names if not (package / name).exists()), None)
    if lacking is None:
        return None
    return f"this host lacks {package / lacking}: copy the package's {FILE_NAME} and rank{rank} to {package} there"


def find_contradiction(findings: Sequence[Finding]) -> str | None:
    """Why ranks with these findings, in order, can't run together."""
    users: dict[tuple[int, str], int] = {}
    first = findings[0]
    for rank, own in enumerate(findings):
        name = f"rank {rank} on {own.host}"
        if own.library != first.library:
            return f"{name} has {own.library}, and rank 0 on {first.host} {first.library}: install the same everywhere"
        if own.gpu is None:
            continue
        if own.gpu.total_bytes < own.needed_bytes:
            return (
                f"{name} needs {format_bytes(own.needed_bytes)}, and its GPU ({own.gpu.name}) has "
                f"{format_bytes(own.gpu.total_bytes)}: compile the model again for such GPUs"
            )
        if (other := users.setdefault((own.machine, own.gpu.bus), rank)) != rank:
            return f"ranks {other} and {rank} on {own.host} have the same GPU ({own.gpu.bus}): each needs its own"
    return None


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
