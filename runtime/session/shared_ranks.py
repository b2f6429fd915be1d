"""The resources that the modules of a pipeline share: a process for each device, and memory used in turn."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from splitc.runtime.errors import MisuseError
from splitc.runtime.gpu.weight_places import SwapBuffer, swappable_bytes
from splitc.runtime.hardware.devices import Device
from splitc.runtime.package.manifest import Manifest
from splitc.runtime.processes.device_processes import DeviceProcesses
from splitc.runtime.requests.turns import Turns

# Numbers of pipelines that swap.
_numbers = itertools.count()


@dataclass(frozen=True)
class SharedRanks:
    """The resources that sessions share. Without `turns`, modules may work at the same time.

    On devices with a buffer `swap`, it has the weights of the module at work; on others all weights stay.
    """

    processes: DeviceProcesses
    swap: Mapping[Device, SwapBuffer]
    turns: Turns | None


def need_turns(modules: Mapping[str, Sequence[Device]]) -> bool:
    """Whether modules on these devices must work in turn: two of them with ranks on several GPUs share a GPU.

    An all-reduce blocks its GPU until all ranks take part. If two GPUs ran the all-reduces of two modules in different
    orders, they would deadlock.
    """
    split = [set(devices) for devices in modules.values() if len(set(devices)) > 1]
    return any(device.kind == "cuda" for one, other in itertools.combinations(split, 2) for device in one & other)


def make_swap(modules: Mapping[str, tuple[Manifest, Sequence[Device]]]) -> dict[Device, SwapBuffer]:
    """A buffer on each device, as large as the largest module's weights there.

    Raises MisuseError for a module with several ranks on one GPU.
    """
    sizes: Counter[Device] = Counter()
    for name, (manifest, devices) in modules.items():
        gpus = [device for device in devices if device.kind == "cuda"]
        if len(set(gpus)) != len(gpus):
            raise MisuseError(f"swap: module '{name}' has several ranks on one GPU, whose weights are needed together")
        for number, device in enumerate(devices):
            rank = manifest.ranks[number % len(manifest.ranks)]
            sizes[device] = max(sizes[device], swappable_bytes(rank))
    number = next(_numbers)
    return {device: SwapBuffer(number, size) for device, size in sizes.items()}
