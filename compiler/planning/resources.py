"""The resources to plan with: devices, their budgets, and the time of blocks on them."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from splitc.compiler.analysis.facts import Analysis
from splitc.compiler.request.request import DEFAULT_HEADROOM
from splitc.runtime.errors import MisuseError
from splitc.runtime.hardware.devices import Device, free_bytes, memory_of
from splitc.runtime.hardware.machine import Machine
from splitc.runtime.tools.engine_costs import EngineCosts
from splitc.runtime.units import first_few, parse_bytes

# Bytes that a rank may use; None if its GPU is not in this machine, so that its memory is not known.
Budget = int | None
# Minimum share, relative to the largest. A smaller one gives its rank no unit of any axis of up to a million units.
LEAST_SHARE = 1e-6
# Measures each block on devices of one kind. The last argument is the threads of each device (None divides the cores
# among them).
BlockTimer = Callable[[Analysis, Sequence[Device], int | None], Sequence[EngineCosts]]


@dataclass(frozen=True)
class Resources:
    """Devices in the user's order, and the budget of each.

    - `threads`: those of each CPU device; None divides the cores.
    - `timer`: measures the blocks. Without one, their time and memory are predicted.
    - `machine`: the known facts about this machine, and the links between hosts.
    """

    devices: tuple[Device, ...]
    budgets: tuple[Budget, ...]
    threads: int | None = None
    timer: BlockTimer | None = None
    machine: Machine = field(default_factory=Machine)

    def take(self, places: Sequence[int]) -> Resources:
        """The devices at these places, in this order."""
        devices = tuple(self.devices[place] for place in places)
        return replace(self, devices=devices, budgets=tuple(self.budgets[place] for place in places))

    def measured(self, analysis: Analysis, place: int) -> Sequence[EngineCosts] | None:
        """The measured costs of each block on the device at `place`; None if blocks are not measured."""
        if self.timer is None:
            return None
        alike = [device for device in self.devices if device.kind == self.devices[place].kind]
        return self.timer(analysis, alike, self.threads)


def find_budgets(devices: Sequence[Device], memory: Sequence[str], headroom: int) -> list[Budget]:
    """The budget of each device in bytes. An entry of `memory` for all devices precedes those for single ones.

    Devices that share a memory share one headroom. Raises MisuseError for a device that occurs twice, an unknown
    device, a second budget for the same, an invalid size, and a headroom without effect.
    """
    names = [str(device) for device in devices]
    if again := [name for name, count in Counter(names).items() if count > 1]:
        raise MisuseError(
            f"{again[0]} is named {names.count(again[0])} times, and each rank would be given its whole memory: name "
            f"each device once. A package's ranks can still run on one: splitc run PACKAGE -d {again[0]},{again[0]}"
        )
    given: dict[str, int] = {}
    for text in memory:
        name, _, amount = text.rpartition("=")
        if name and name not in names:
            raise MisuseError(f"--memory names '{name}', and the devices are {first_few(names)}")
        if name in given:
            named = f"of {name}" if name else "of all devices: name a device, as in --memory cpu1=2GiB"
            raise MisuseError(f"--memory gives two budgets {named}")
        given[name] = parse_bytes(amount)
    asked = {name: given[key] for name in names for key in ("", name) if key in given}
    open_names = set(names) - asked.keys()
    free = _free_beyond(devices, headroom) if open_names else {}
    budgets = [asked.get(name, free.get(name)) for name in names]
    if not open_names and headroom != DEFAULT_HEADROOM and names:
        raise MisuseError("--headroom is left free of free memory, and --memory gives the budget of every device")
    return budgets


def is_limited(device: Device, memory: Sequence[str]) -> bool:
    """Whether an entry of `memory` gives the device's budget. Otherwise it is the free memory."""
    return any("=" not in entry or entry.startswith(f"{device}=") for entry in memory)


def _free_beyond(devices: Sequence[Device], headroom: int) -> dict[str, Budget]:
    """The free memory of each device, less its share of the headroom. With GPUs, the query takes a second."""
    sharers = Counter(map(memory_of, devices))
    return {
        str(device): None if free is None else max(0, free - headroom // sharers[memory_of(device)])
        for device, free in zip(devices, free_bytes(devices), strict=True)
    }


def as_shares(budgets: Sequence[Budget]) -> list[float]:
    """Shares in proportion to budgets; equal unless all budgets are known."""
    known = [budget for budget in budgets if budget is not None]
    return [float(max(1, budget)) for budget in known] if len(known) == len(budgets) else [1.0] * len(budgets)


def check_shares(tensor_split: Sequence[float] | None, count: int) -> None:
    """Raise MisuseError unless `tensor_split` is None or has one share for each device, none of them negligible."""
    if tensor_split is None:
        return
    if len(tensor_split) != count:
        raise MisuseError(f"--tensor-split has {len(tensor_split)} shares, and there are {count} devices")
    if not all(0 < share < math.inf for share in tensor_split):
        raise MisuseError("--tensor-split takes shares above 0: leave a device out of -d to give it nothing")
    if min(tensor_split) < LEAST_SHARE * max(tensor_split):
        raise MisuseError(
            f"--tensor-split has the shares {min(tensor_split):g} and {max(tensor_split):g}: the least is a "
            "millionth of the largest; leave a device out of -d to give it nothing"
        )
