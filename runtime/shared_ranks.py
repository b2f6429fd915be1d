"""What the sessions of a pipeline's modules share: the processes of their devices, and memory that they use in turn."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from splitc.runtime.devices import Device
from splitc.runtime.engines.weight_places import SwapRoom, swappable_bytes
from splitc.runtime.errors import MisuseError
from splitc.runtime.manifest import Manifest
from splitc.runtime.processes.device_processes import DeviceProcesses
from splitc.runtime.turns import Turns

# Numbers of pipelines that swap.
_numbers = itertools.count()


@dataclass(frozen=True)
class Swap:
    """The modules of a pipeline work in turn. `rooms` have the weights of whichever is at work, on each device."""

    rooms: Mapping[Device, SwapRoom]
    turns: Turns = field(default_factory=Turns)


@dataclass(frozen=True)
class SharedRanks:
    """What sessions share. Without `swap`, all modules stay where they are, and may work at the same time."""

    processes: DeviceProcesses
    swap: Swap | None = None


def make_swap(modules: Mapping[str, tuple[Manifest, Sequence[Device]]]) -> Swap:
    """A room on each device as large as the largest module's weights there.

    Raises MisuseError for a module with several ranks on one GPU.
    """
    rooms: Counter[Device] = Counter()
    for name, (manifest, devices) in modules.items():
        gpus = [device for device in devices if device.kind == "cuda"]
        if len(set(gpus)) != len(gpus):
            raise MisuseError(f"swap: module '{name}' has several ranks on one GPU, whose weights are there together")
        for device, rank in zip(devices, manifest.ranks, strict=True):
            rooms[device] = max(rooms[device], swappable_bytes(rank))
    number = next(_numbers)
    return Swap({device: SwapRoom(number, size) for device, size in rooms.items()})
