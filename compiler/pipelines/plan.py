"""The plans of a folder's modules, on devices that they share: what they hold there, and the memory that they leave.

Weights, caches, engines and the memory for requests with adapters add up. Of activations the largest counts, since
modules run one after the other.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from types import MappingProxyType

from splitc.compiler.pipelines.common_weights import NONE, CommonWeights
from splitc.compiler.pipelines.folder import FolderModule, ModelFolder
from splitc.compiler.planning.plan import Plan
from splitc.compiler.planning.rank_plan import RankPlan
from splitc.compiler.planning.resources import Budget
from splitc.runtime.engines.kinds import find_kind, has_collectives
from splitc.runtime.errors import DoesNotFitError, SplitcError
from splitc.runtime.files.listing import Listed, Listing
from splitc.runtime.gpu.weight_places import PASSED_ON
from splitc.runtime.hardware.devices import Device
from splitc.runtime.units import first_few, format_bytes


@dataclass(frozen=True)
class DeviceSum:
    """The bytes that all modules together hold on a device.

    - `weights`: without weights that another module holds there already. Of swapped weights, only the largest module's.
    - `activations`: the most that one module needs while it runs, including memory that it needs only while it is
      loaded.
    - `common`: bytes that several modules have and the device holds once.
    - `swapped`: the part of `weights` that modules swap.
    - `mapped`: the part of `weights` that stays in files, and takes no memory.
    - `adapters`: the additional memory for requests with adapters.
    """

    device: str
    budget: Budget
    weights: int = 0
    cache: int = 0
    engines: int = 0
    activations: int = 0
    common: int = 0
    swapped: int = 0
    mapped: int = 0
    adapters: int = 0

    @property
    def resident(self) -> int:
        """The bytes that stay while other modules run."""
        return self.weights - self.mapped + self.cache + self.engines + self.adapters

    @property
    def total(self) -> int:
        """The most bytes at any time."""
        return self.resident + self.activations

    @property
    def left(self) -> Budget:
        """The budget that is left for resident bytes; below 0 if it is exceeded."""
        return None if self.budget is None else self.budget - self.resident

    @property
    def missing(self) -> int:
        """The bytes by which the total exceeds the budget."""
        return 0 if self.budget is None else max(0, self.total - self.budget)


def sum_devices(
    plans: Iterable[Plan],
    budgets: Mapping[str, Budget],
    spared: Mapping[str, int] = MappingProxyType({}),
    swap: bool = False,
) -> list[DeviceSum]:
    """The bytes that plans hold together on each device with a budget. `spared` are bytes that are held once there.

    With `swap`, modules work in turn, and only then have memory for their weights.
    """
    sums = {device: DeviceSum(device, budget) for device, budget in budgets.items()}
    for plan in plans:  # an edited plan may name more
        own: dict[str, list[RankPlan]] = {}
        for rank in plan.ranks:
            own.setdefault(str(rank.device), []).append(rank)
        for device, ranks in own.items():
            moved = sum(rank.memory.held_weights for rank in ranks if swap and can_swap(plan, rank))
            sums[device] = _add(sums.get(device, DeviceSum(device, None)), ranks, moved)
    both = [(device_sum, spared.get(device_sum.device, 0)) for device_sum in sums.values()]
    return [replace(device_sum, weights=device_sum.weights - common, common=common) for device_sum, common in both]


def can_swap(plan: Plan, rank: RankPlan) -> bool:
    """Whether a rank's weights can be swapped; on GPUs, if it has one engine, and their types can be passed on."""
    kind, device = find_kind(plan.engine), rank.device
    if device.kind not in kind.swaps_weights or device.kind == "cpu":
        return device.kind in kind.swaps_weights
    inside = has_collectives(plan.engine, [other.device for other in plan.ranks])
    weights = plan.analysis.costs.weights(rank.stage.nodes)
    types = {str(value.const_value.dtype.numpy()) for value in weights if value.const_value is not None}
    return not plan.split.more_sessions(rank, inside) and types <= PASSED_ON


def _add(before: DeviceSum, ranks: Sequence[RankPlan], moved: int) -> DeviceSum:
    """The sum with one module's ranks on the device. `moved` are the bytes of their weights that it swaps."""
    memory = [rank.memory for rank in ranks]
    terms = ("weights", "cache", "engines", "adapters", "in_files")
    weights, cache, engines, adapters, mapped = (sum(getattr(own, term) for own in memory) for term in terms)
    running = sum(own.total for own in memory) - (weights - mapped + cache + engines + adapters)
    swapped = max(before.swapped, moved)
    return replace(
        before,
        weights=before.weights - before.swapped + weights - moved + swapped,
        cache=before.cache + cache,
        engines=before.engines + engines,
        activations=max(before.activations, running),
        swapped=swapped,
        mapped=before.mapped + mapped,
        adapters=before.adapters + adapters,
    )


def left_for(devices: Sequence[Device], sums: Sequence[DeviceSum], running: bool, swapped: bool) -> list[str]:
    """The budgets of one more module, as `--memory` takes them: what the others leave on its devices.

    With `running`, the others' activations are kept free too, for a module that holds more than it needs while it runs.
    With `swapped`, the weights that others swap are, for a module that needs more while it runs.
    """
    count = Counter(map(str, devices))

    def budget(held: DeviceSum, left: int) -> int:
        return max(0, left - running * held.activations + (not swapped) * held.swapped) // count[held.device]

    return [
        f"{held.device}={budget(held, held.left)}" for held in sums if held.device in count and held.left is not None
    ]


@dataclass(frozen=True)
class ModulePlan:
    """A module's plan, and why it is on these devices. Its budgets are what earlier modules left."""

    module: FolderModule
    plan: Plan
    why: str

    @property
    def name(self) -> str:
        """The module's name."""
        return self.module.name


@dataclass(frozen=True, repr=False)
class PipelinePlan(Listed):
    """The plans of all modules of a folder, in the folder's order, and the budgets of the devices by name.

    `common` are the weights that modules have in common. With `swap`, modules work in turn, and only the one at work
    has its weights in memory.
    """

    folder: ModelFolder
    modules: tuple[ModulePlan, ...]
    budgets: Mapping[str, Budget]
    common: CommonWeights = NONE
    swap: bool = False

    @property
    def devices(self) -> list[DeviceSum]:
        """What all modules together hold on each device."""
        return sum_devices([module.plan for module in self.modules], self.budgets, self.common.spared, self.swap)

    def _listing(self) -> Listing:
        rows = []
        for module in self.modules:
            ranks = module.plan.ranks
            held, peak = sum(rank.memory.weights for rank in ranks), max(rank.memory.total for rank in ranks)
            devices = first_few([str(rank.device) for rank in ranks])
            rows.append([module.name, module.plan.split_mode, devices, format_bytes(held), format_bytes(peak)])
        title = f"Plan of {self.folder.path.name}: {first_few([module.name for module in self.modules])}"
        return Listing(title, ("module", "mode", "devices", "weights", "largest peak"), rows)


def need_fit(plan: PipelinePlan) -> None:
    """Raise DoesNotFitError, which names the device, if all modules together need more than its budget."""
    for device in plan.devices:
        if device.missing:
            raise DoesNotFitError(
                f"the modules need {format_bytes(device.total)} of {device.device} together, which may use "
                f"{format_bytes(device.budget)}, {format_bytes(device.missing)} short: "
                "plan again, or move blocks in the plan"
            )


@contextmanager
def module_named(name: str, sums: Sequence[DeviceSum] = ()) -> Iterator[None]:
    """Add the module's name to errors, and to memory errors what the other modules hold."""
    try:
        yield
    except SplitcError as error:
        held = [
            f"{format_bytes(there.resident)} of {there.device}, and {format_bytes(there.activations)} more as they run"
            for there in sums
            if there.resident
        ]
        is_memory = held and isinstance(error, DoesNotFitError)
        taken = f"\nThe modules planned before it hold {'; '.join(held)}." if is_memory else ""
        raise type(error)(f"module '{name}': {error}{taken}") from error
