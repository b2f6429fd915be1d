"""The plans of a folder's modules, on devices that they share."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from splitc.compiler.pipelines.common_weights import NONE, CommonWeights
from splitc.compiler.pipelines.folder import FolderModule, ModelFolder
from splitc.compiler.pipelines.ledger import DeviceSum, sum_devices
from splitc.compiler.planning.plan import Plan
from splitc.compiler.planning.resources import Budget
from splitc.runtime.errors import DoesNotFitError, SplitcError
from splitc.runtime.files.listing import Listed, Listing
from splitc.runtime.units import first_few, format_bytes


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
