"""Places the modules of a folder on devices, one after the other: each gets the memory that earlier ones leave."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from splitc.compiler.api import plan_model
from splitc.compiler.errors import CannotSplitError
from splitc.compiler.modes.table import AUTO
from splitc.compiler.pipelines.common_weights import find_common
from splitc.compiler.pipelines.config_sizes import find_sizes
from splitc.compiler.pipelines.folder import read_folder
from splitc.compiler.pipelines.plan import DeviceSum, ModulePlan, PipelinePlan, left_for, module_named, sum_devices
from splitc.compiler.pipelines.requests import ModuleRequest, PipelineRequest, divide_request
from splitc.compiler.planning.plan import Plan
from splitc.compiler.planning.resources import Budget, find_budgets
from splitc.compiler.request.request import DEFAULT_HEADROOM, Request
from splitc.runtime.errors import DoesNotFitError, MisuseError, SplitcError, collected, raise_all
from splitc.runtime.hardware.devices import Device
from splitc.runtime.threads.garbage import rare_garbage

# Modules are split, largest first, until the fullest device holds at most this many times an even share. A more even
# placement is not worth making a small module slower. A choice: a split module's ranks wait for each other.
UNEVEN = 1.2
# The free memory of a device that holds nothing, if budgets are not known: more than on any other.
EMPTY = 1
LAYER = "layer"
# Why a module is where it is.
NAMED, ONLY = "as asked for", "the only device"
SMALL, LARGE, MISFIT, UNSPLIT = (
    "whole, on the device with the most free memory",
    "split, to relieve the fullest device",
    "split, since it does not fit the device with the most free memory",
    "large, but can't be split over all devices, so it is on fewer",
)


@rare_garbage()
def plan_pipeline(
    folder: str | Path,
    devices: str | Sequence[str] = (),
    request: Request = Request(),
    wanted: Sequence[str] = (),
    swap: bool = False,
) -> PipelinePlan:
    """Decide which part of which module of a folder each device holds.

        plan_pipeline("folder", ["te=cpu1", "unet=cpu0&cpu1", "cpu0"], Request(split_mode="unet=layer"))

    `devices` and the request's mode, shapes and settings may name modules, as on the command line. Without devices, all
    GPUs of this machine are used. `wanted` are the modules to take; by default all, and one of a model in two forms.
    Modules with devices of their own come first, then the largest. `tensor_split` has the shares of each module that is
    split, and `batch_groups` the number of its groups. With `swap`, modules work in turn, and only the one at work has
    its weights in memory.

    Raises as `plan_model` does, with the module's name; ModelError for a folder without models, MisuseError if a module
    does not exist.
    """
    read = read_folder(Path(folder), wanted, request.settings.keys(), request.trust_external_data)
    asked = divide_request(read, [devices] if isinstance(devices, str) else devices, request)
    modules = [
        replace(module, request=replace(module.request, stated=find_sizes(read, module.module)))
        for module in asked.modules
    ]
    planner = Planner(asked, _find_budgets(asked.devices, request), swap)
    modules = sorted(modules, key=lambda module: -module.module.facts.weights_bytes)
    named = [module for module in modules if module.devices is not None]
    free = [module for module in modules if module.devices is None]
    errors: list[SplitcError] = []
    for module in named:
        with collected(errors):
            planner.place(module, module.devices or (), NAMED)
    splits = planner.count_splits([module.module.facts.weights_bytes for module in free])
    for number, module in enumerate(free):
        with collected(errors):
            planner.place_freely(module, number < splits)
    raise_all(errors)
    groups = "--batch-groups" if request.batch_groups > 1 else ""
    flag = groups if request.tensor_split is None else "--tensor-split"
    if flag and all(len(module.plan.ranks) == 1 for module in planner.done.values()):
        raise MisuseError(f"{flag} has no effect: no model of the folder is split, each is whole on one device")
    common = find_common({name: planner.done[name].plan for name in read.names}, swap)
    return PipelinePlan(read, tuple(planner.done[name] for name in read.names), planner.budgets, common, swap)


def _find_budgets(devices: Sequence[Device], request: Request) -> Mapping[str, Budget]:
    budgets = find_budgets(devices, request.memory, request.headroom)
    return {str(device): budget for device, budget in zip(devices, budgets, strict=True)}


class Planner:
    """Plans modules one after the other. `done` are their plans by name."""

    def __init__(self, pipeline: PipelineRequest, budgets: Mapping[str, Budget], swap: bool = False) -> None:
        self.budgets = budgets
        self._swap = swap
        self.done: dict[str, ModulePlan] = {}
        self._shared = pipeline.shared
        self._alone = len(pipeline.modules) == 1

    @property
    def sums(self) -> list[DeviceSum]:
        """What the devices hold so far."""
        return sum_devices([module.plan for module in self.done.values()], self.budgets, swap=self._swap)

    def place(self, asked: ModuleRequest, devices: Sequence[Device], why: str) -> None:
        """Place a module on these devices. On a single device it is whole, unless a mode was asked for this module."""
        if len(devices) == 1:  # shares and groups are for modules that are split
            whole = replace(asked.request, tensor_split=None)
            alone = replace(whole, batch_groups=1).in_mode(LAYER)
            asked = replace(asked, request=whole if asked.own_mode else alone)
        with module_named(asked.module.name, self.sums):
            self.done[asked.module.name] = ModulePlan(asked.module, self._plan(asked, devices), why)

    def place_freely(self, asked: ModuleRequest, is_large: bool) -> None:
        """Place a module on one shared device, or on all of them if it is large, or a mode was asked for it."""
        if len(self._shared) == 1 or self._alone or (asked.own_mode and asked.request.split_mode != AUTO):
            self.place(asked, self._shared, ONLY if len(self._shared) == 1 else NAMED)
        elif is_large:
            self._spread(asked, LARGE)
        else:
            free = self._free()
            freest = self._shared[free.index(max(free))]
            try:
                self.place(replace(asked, own_mode=False), [freest], SMALL)
            except DoesNotFitError:
                self._spread(asked, MISFIT)

    def count_splits(self, sizes: Sequence[int]) -> int:
        """The number of shared modules to split, from the largest on. `sizes` are the bytes of their weights."""
        free = [max(1.0, float(size)) for size in self._free()]
        even = sum(sizes) / sum(free)
        for count in range(len(sizes)):
            held = [sum(sizes[:count]) * own / sum(free) for own in free]
            for size in sizes[count:]:
                freest = max(range(len(free)), key=lambda place: free[place] - held[place])
                held[freest] += size
            if max(size / own for size, own in zip(held, free, strict=True)) <= UNEVEN * even:
                return count
        return len(sizes)

    def _free(self) -> list[int]:
        """The free bytes of each shared device. If a budget is not known, devices are compared by what they hold."""
        sums = {held.device: held for held in self.sums}
        shared = [sums[str(device)] for device in self._shared]
        known = [held.left for held in shared if held.left is not None]
        fullest = max(held.resident for held in sums.values())
        return known if len(known) == len(shared) else [2 * fullest + EMPTY - held.resident for held in shared]

    def _spread(self, asked: ModuleRequest, why: str) -> None:
        """Place a module on all shared devices. If it can't be split, it stays whole if it may, and the plan says so.

        It is spread to relieve a device, so copies of it would not help, unless groups were asked for.
        """
        asked = replace(asked, request=replace(asked.request, may_copy=asked.request.batch_groups > 1))
        try:
            self.place(replace(asked, request=replace(asked.request, spread=True)), self._shared, why)
            return
        except (CannotSplitError, DoesNotFitError, MisuseError) as error:
            if asked.request.split_mode != AUTO or why == MISFIT:
                raise
            reason = str(error.__cause__ or error).splitlines()[0].rstrip(":")
        self.place(asked, self._shared, UNSPLIT)
        module = self.done[asked.module.name]
        plan = replace(module.plan, warnings=(*module.plan.warnings, f"not split over all devices: {reason}"))
        self.done[module.name] = replace(module, plan=plan)

    def _plan(self, asked: ModuleRequest, devices: Sequence[Device]) -> Plan:
        """The module's plan in the memory that is left, or in less, to keep the others' activations free."""
        before, plans = self.sums, [module.plan for module in self.done.values()]
        for running, swapped in ((False, False), (True, False), (True, True)):
            # The budgets leave the headroom free already.
            memory = left_for(devices, before, running, swapped)
            request = replace(asked.request, memory=memory, headroom=DEFAULT_HEADROOM)
            plan = plan_model(asked.module.facts.path, [str(device) for device in devices], request)
            if not any(device.missing for device in sum_devices([*plans, plan], self.budgets, swap=self._swap)):
                break
        return plan
