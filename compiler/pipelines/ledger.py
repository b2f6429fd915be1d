"""What modules hold of the devices that they share, and what they leave.

Weights, caches and engines stay. Activations do not add up, since modules run one after the other: the largest counts.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType

from splitc.compiler.planning.plan import Plan
from splitc.compiler.planning.rank_plan import RankPlan
from splitc.compiler.planning.resources import Budget
from splitc.runtime.devices import Device


@dataclass(frozen=True)
class DeviceSum:
    """The bytes that all modules hold on a device; `activations` are the most that one of them needs as it runs.

    While a module is loaded it may need more than when it runs, which `activations` has too. `common` are bytes that
    several modules have and the device holds once; `weights` are without them.
    """

    device: str
    budget: Budget
    weights: int = 0
    cache: int = 0
    engines: int = 0
    activations: int = 0
    common: int = 0

    @property
    def resident(self) -> int:
        """The bytes that stay while other modules run."""
        return self.weights + self.cache + self.engines

    @property
    def total(self) -> int:
        """The most bytes at any time."""
        return self.resident + self.activations

    @property
    def room(self) -> Budget:
        """The budget that is left for what stays; below 0 if there is none."""
        return None if self.budget is None else self.budget - self.resident

    @property
    def missing(self) -> int:
        """The bytes by which it exceeds its budget."""
        return 0 if self.budget is None else max(0, self.total - self.budget)


def sum_devices(
    plans: Iterable[Plan], budgets: Mapping[str, Budget], spared: Mapping[str, int] = MappingProxyType({})
) -> list[DeviceSum]:
    """What plans hold together on each device that has a budget. `spared` are the bytes that are held once there."""
    found = {device: DeviceSum(device, budget) for device, budget in budgets.items()}
    for plan in plans:  # an edited plan may name more
        own: dict[str, list[RankPlan]] = {}
        for rank in plan.ranks:
            own.setdefault(str(rank.device), []).append(rank)
        for device, ranks in own.items():
            found[device] = _add(found.get(device, DeviceSum(device, None)), ranks)
    return [_spare(each, spared.get(each.device, 0)) for each in found.values()]


def _spare(each: DeviceSum, common: int) -> DeviceSum:
    return replace(each, weights=each.weights - common, common=common)


def _add(before: DeviceSum, ranks: Sequence[RankPlan]) -> DeviceSum:
    """The sum with the ranks that one module has on the device."""
    memory = [rank.memory for rank in ranks]
    weights, cache, engines = (sum(getattr(each, of) for each in memory) for of in ("weights", "cache", "engines"))
    running = sum(each.total for each in memory) - weights - cache - engines
    return DeviceSum(
        before.device,
        before.budget,
        before.weights + weights,
        before.cache + cache,
        before.engines + engines,
        max(before.activations, running),
    )


def left_for(devices: Sequence[Device], sums: Sequence[DeviceSum], running: bool) -> list[str]:
    """The budgets of one more module as `--memory` has them: what the others leave on its devices.

    With `running`, the others' activations are kept free too, for a module that holds more than it needs as it runs.
    """
    count = Counter(map(str, devices))
    return [
        f"{each.device}={max(0, each.room - running * each.activations) // count[each.device]}"
        for each in sums
        if each.device in count and each.room is not None
    ]
