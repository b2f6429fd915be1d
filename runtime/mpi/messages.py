"""Messages between MPI's processes, besides those of all rank processes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from splitc.runtime.hardware.devices import Device
from splitc.runtime.mpi.world import World


@dataclass(frozen=True)
class Join:
    """Asks all ranks to load their engines of a package, for the session with this number in process 0.

    - `first`, `size`: the process of the replica's first rank, and the number of its ranks. Each replica has a number.
    - `lane`: the lane of its messages.
    - `seal`: the hash of the package's manifest.
    - `devices`: those of all replicas.
    - `threads`, `cuda_graphs`: see Deployment.
    """

    number: int
    package: Path
    seal: str
    devices: tuple[Device, ...]
    threads: int
    verify: str
    cuda_graphs: bool
    spin: float
    first: int
    size: int
    lane: int


@dataclass(frozen=True)
class Call:
    """Asks a process to call a function with its World, while there is no session."""

    function: Callable[[World], None]


@dataclass(frozen=True)
class AllLoaded:
    """All ranks of a session have loaded their engines, and are connected."""


@dataclass(frozen=True)
class Stop:
    """A session ends at once: some ranks may hang or be gone."""


@dataclass(frozen=True)
class Leave:
    """The program in process 0 ends, and the receiving process must end too."""


@dataclass(frozen=True)
class Left:
    """A rank has left a session; or, in answer to Leave, its program is about to end."""
