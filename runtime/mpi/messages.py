"""What the processes that MPI has started say besides what all ranks' processes do."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from splitc.runtime.hardware.devices import Device
from splitc.runtime.mpi.world import World
from splitc.runtime.package.manifest import State


@dataclass(frozen=True)
class Join:
    """Asks all ranks to load their engines of a package, for the session of this number in process 0.

    `seal` is the hash of the package's manifest. The rest is as for a Session.
    """

    number: int
    package: Path
    seal: str
    devices: tuple[Device, ...]
    states: tuple[State, ...]
    threads: int | None
    verify: str
    cuda_graphs: bool
    spin: float


@dataclass(frozen=True)
class Call:
    """Asks a process to call a function with its World, while there is no session."""

    function: Callable[[World], None]


@dataclass(frozen=True)
class AllLoaded:
    """All ranks of a session have loaded their engines, and are connected."""


@dataclass(frozen=True)
class Stop:
    """A session ends at once: some ranks may not be able to take part in anything any more."""


@dataclass(frozen=True)
class Leave:
    """The program in process 0 ends: so does the one that gets this."""


@dataclass(frozen=True)
class Left:
    """A rank has ended its part of a session; or, in answer to Leave, its program is about to end."""
