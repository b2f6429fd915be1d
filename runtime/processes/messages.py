"""What a session and the processes of its ranks tell each other."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from splitc.runtime.arrays import Zeros
from splitc.runtime.devices import Device
from splitc.runtime.manifest import State
from splitc.runtime.memory_use import RankMemory
from splitc.runtime.shared_memory import Placed, Sent


@dataclass(frozen=True)
class Start:
    """What a rank's process needs to know. Numbers of files are descriptors that it inherits.

    `channels` has a socket for each other rank, `meetings` the memory where the engines of a group of CPU devices meet,
    `pulse` the memory for a sign of life of each rank. A rank looks for work for `spin` seconds before it sleeps.
    """

    package: Path
    number: int
    devices: Sequence[Device]
    states: Sequence[State]
    threads: int
    cuda_graphs: bool
    in_flight: int
    channels: Mapping[int, int]
    meetings: Mapping[tuple[int, ...], int]
    pulse: int
    parent: int
    spin: float


@dataclass(frozen=True)
class Order:
    """A request. Its feeds, and its initial states that are not zeros, are in the slot of its number.

    `unused` are the buffers of each rank that it may use again.
    """

    number: int
    feeds: Sequence[Placed]
    initial: Sequence[Placed]
    zeros: Mapping[str, Zeros]
    sequence: int | None
    room: bool
    renewed: bool
    unused: Sequence[Sequence[int]]


@dataclass(frozen=True)
class Forget:
    """Free the states of a sequence."""

    sequence: int


@dataclass(frozen=True)
class Ask:
    """Asks for a Report."""


@dataclass(frozen=True)
class Loaded:
    """A rank has loaded its engines, or could not. `files` are those that NCCL may leave behind."""

    error: BaseException | None
    files: Collection[str] = ()


@dataclass(frozen=True)
class Report:
    """The memory of a rank's GPU, None for a CPU device, and messages for the user."""

    memory: RankMemory | None
    notes: Sequence[str]


@dataclass(frozen=True)
class Answer:
    """A rank has finished a request.

    `spans` has, for each step that ran, its number in the rank's program (-1 for a replay) and when it ran.
    """

    number: int
    outputs: Sent | None
    start: float
    end: float
    spans: Sequence[tuple[int, float, float]]
    error: BaseException | None


@dataclass(frozen=True)
class Broken:
    """A rank can't go on, unless all other ranks fail in `request` too, the last one in which it failed itself."""

    error: BaseException
    request: int | None
