"""The settings that all ranks of a session share."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from splitc.runtime.hardware.devices import Device
from splitc.runtime.package.manifest import Manifest


@dataclass(frozen=True)
class Deployment:
    """A package on devices, one for each rank.

    - `threads`: the number for each CPU device; 0 lets the ranks choose.
    - `cuda_graphs`: whether requests on GPUs are replayed where possible.
    - `shares`: what each rank's engines may take of a container's memory: see `divide_container`.
    - `first`: the number in the session of this replica's first rank, if there are several replicas.
    - `all_devices`: the devices of all replicas.
    """

    package: Path
    manifest: Manifest
    devices: Sequence[Device]
    threads: int
    cuda_graphs: bool
    shares: Sequence[int | None]
    first: int
    all_devices: Sequence[Device]


def deployments(
    package: Path,
    manifest: Manifest,
    devices: Sequence[Device],
    threads: int,
    cuda_graphs: bool,
    shares: Sequence[int | None],
) -> list[Deployment]:
    """Those of all replicas, whose `devices` and `shares` follow one another. For the rest see Deployment."""
    count = len(manifest.ranks)
    groups = [slice(first, first + count) for first in range(0, len(devices), count)]
    return [
        Deployment(package, manifest, devices[of], threads, cuda_graphs, shares[of], of.start, devices) for of in groups
    ]
