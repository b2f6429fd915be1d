"""What the sessions of a pipeline's modules share: the processes of their devices, and memory that they use in turn."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from splitc.runtime.errors import MisuseError
from splitc.runtime.gpu.weight_places import SwapRoom, swappable_bytes
from splitc.runtime.hardware.devices import Device
from splitc.runtime.package.manifest import Manifest
from splitc.runtime.processes.device_processes import DeviceProcesses
from splitc.runtime.requests.turns import Turns

# Numbers of pipelines that swap.
_numbers = itertools.count()


@dataclass(frozen=True)
class Swap:
    """`rooms` have the weights of whichever module is at work, on each device."""

    rooms: Mapping[Device, SwapRoom]


@dataclass(frozen=True)
class SharedRanks:
    """What sessions share. Without `turns`, modules may work at the same time; without `swap`, their weights stay."""

    processes: DeviceProcesses
    swap: Swap | None = None
    turns: Turns | None = None


def need_turns(modules: Mapping[str, Sequence[Device]]) -> bool:
    """Whether modules on these devices must work in turn: two of them have ranks on several GPUs, and share one.

    A rank's sum waits on its GPU for those of the other ranks. If these wait behind another module's sum, which waits
    for this GPU, neither ever ends.
    """
    split = [set(devices) for devices in modules.values() if len(set(devices)) > 1]
    return any(device.kind == "cuda" for one, other in itertools.combinations(split, 2) for device in one & other)


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
