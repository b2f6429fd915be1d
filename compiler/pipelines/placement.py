"""Place the modules of a folder on devices, one after the other: each gets the room that those before it leave."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from splitc.compiler.api import plan_model
from splitc.compiler.errors import CannotSplitError
from splitc.compiler.modes.table import AUTO
from splitc.compiler.pipelines.common_weights import find_common
from splitc.compiler.pipelines.config_sizes import find_sizes
from splitc.compiler.pipelines.ledger import DeviceSum, left_for, sum_devices
from splitc.compiler.pipelines.model_folder import read_folder
from splitc.compiler.pipelines.module_requests import ModuleRequest, PipelineRequest, divide_request
from splitc.compiler.pipelines.pipeline_plan import ModulePlan, PipelinePlan, module_named
from splitc.compiler.planning.plan import Plan
from splitc.compiler.planning.resources import Budget, find_budgets
from splitc.compiler.request.request import DEFAULT_HEADROOM, Request
from splitc.runtime.errors import DoesNotFitError, MisuseError, SplitcError, collected, raise_all
from splitc.runtime.hardware.devices import Device

# Modules are split, the largest first, until the fullest device holds at most this much more than an even share: less
# is not worth making a small module slower.
UNEVEN = 1.2
# The room of a device that holds nothing, where budgets are not known.
EMPTY = 1
LAYER = "layer"
# Why a module is where it is.
NAMED, ONLY = "as asked for", "the only device"
SMALL, LARGE, MISFIT, UNSPLIT = (
    "whole, on the device with most room",
    "split, which relieves the fullest device",
    "split, since it does not fit the device with most room",
    "large, but on fewer devices than there are, since it can't be split over all",
)


def plan_pipeline(
    folder: str | Path,
    devices: Sequence[str],
    request: Request = Request(),
    wanted: Sequence[str] = (),
    swap: bool = False,
) -> PipelinePlan:
    """Decide which part of which module of a folder each device holds.

    `devices` and the request's mode, shapes and settings may name modules, as on the command line. `wanted` are the
    modules to take; by default all, of a model in two forms one. Modules with devices of their own come first, then
    the largest. `tensor_split` has the shares of each module that is split. With `swap`, modules work in turn, and give
    each other the memory of their weights.

    Raises as `plan_model` does, with the module's name; ModelError for a folder without models, MisuseError for a
    module that is not there.
    """
    read = read_folder(Path(folder), wanted, request.settings.keys(), request.trust_external_data)
    asked = divide_request(read, devices, request)
    stated = [replace(each.request, stated=find_sizes(read, each.module)) for each in asked.modules]
    modules = [replace(each, request=known) for each, known in zip(asked.modules, stated, strict=True)]
    planner = Planner(asked, _find_budgets(asked.devices, request), swap)
    modules = sorted(modules, key=lambda each: -each.module.facts.weights_bytes)
    named = [each for each in modules if each.devices is not None]
    free = [each for each in modules if each.devices is None]
    errors: list[SplitcError] = []
    for each in named:
        with collected(errors):
            planner.place(each, each.devices or (), NAMED)
    splits = planner.count_splits([each.module.facts.weights_bytes for each in free])
    for number, each in enumerate(free):
        with collected(errors):
            planner.place_freely(each, number < splits)
    raise_all(errors)
    if request.tensor_split is not None and all(len(each.plan.ranks) == 1 for each in planner.done.values()):
        raise MisuseError("--tensor-split has no effect: no model of the folder is split, each is whole on one device")
    common = find_common({name: planner.done[name].plan for name in read.names}, swap)
    return PipelinePlan(read, tuple(planner.done[name] for name in read.names), planner.budgets, common, swap)


def _find_budgets(devices: Sequence[Device], request: Request) -> Mapping[str, Budget]:
    found = find_budgets(devices, request.memory, request.headroom)
    return {str(device): budget for device, budget in zip(devices, found, strict=True)}


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
        return sum_devices([each.plan for each in self.done.values()], self.budgets, swap=self._swap)

    def place(self, asked: ModuleRequest, devices: Sequence[Device], why: str) -> None:
        """Put a module on these devices. On one of them it is whole, unless its own mode was asked for."""
        if len(devices) == 1:  # shares are for those that are split
            whole = replace(asked.request, tensor_split=None)
            asked = replace(asked, request=whole if asked.own_mode else whole.in_mode(LAYER))
        with module_named(asked.module.name, self.sums):
            self.done[asked.module.name] = ModulePlan(asked.module, self._plan(asked, devices), why)

    def place_freely(self, asked: ModuleRequest, is_large: bool) -> None:
        """Put a module on one of the shared devices, or over all of them if it is large, or its mode was asked for."""
        if len(self._shared) == 1 or self._alone or (asked.own_mode and asked.request.split_mode != AUTO):
            self.place(asked, self._shared, ONLY if len(self._shared) == 1 else NAMED)
        elif is_large:
            self._spread(asked, LARGE)
        else:
            rooms = self._rooms()
            roomiest = self._shared[rooms.index(max(rooms))]
            try:
                self.place(replace(asked, own_mode=False), [roomiest], SMALL)
            except DoesNotFitError:
                self._spread(asked, MISFIT)

    def count_splits(self, sizes: Sequence[int]) -> int:
        """How many of the shared modules, whose weights have these sizes, from the largest on, are to be split."""
        rooms = [max(1.0, float(room)) for room in self._rooms()]
        even = sum(sizes) / sum(rooms)
        for count in range(len(sizes)):
            held = [sum(sizes[:count]) * room / sum(rooms) for room in rooms]
            for size in sizes[count:]:
                roomiest = max(range(len(rooms)), key=lambda place: rooms[place] - held[place])
                held[roomiest] += size
            if max(each / room for each, room in zip(held, rooms, strict=True)) <= UNEVEN * even:
                return count
        return len(sizes)

    def _rooms(self) -> list[int]:
        """The room on each shared device. Where a budget is not known, they are compared by what they hold."""
        sums = {each.device: each for each in self.sums}
        shared = [sums[str(device)] for device in self._shared]
        known = [each.room for each in shared if each.room is not None]
        fullest = max(each.resident for each in sums.values())
        return known if len(known) == len(shared) else [2 * fullest + EMPTY - each.resident for each in shared]

    def _spread(self, asked: ModuleRequest, why: str) -> None:
        """Put a module over all shared devices. What can't be split stays whole if it may, and the plan says so."""
        try:
            self.place(replace(asked, request=replace(asked.request, spread=True)), self._shared, why)
            return
        except (CannotSplitError, DoesNotFitError, MisuseError) as error:
            if asked.request.split_mode != AUTO or why == MISFIT:
                raise
            reason = str(error.__cause__ or error).splitlines()[0].rstrip(":")
        self.place(asked, self._shared, UNSPLIT)
        made = self.done[asked.module.name]
        plan = replace(made.plan, warnings=(*made.plan.warnings, f"not split over all devices: {reason}"))
        self.done[made.name] = replace(made, plan=plan)

    def _plan(self, asked: ModuleRequest, devices: Sequence[Device]) -> Plan:
        """The module's plan in the room that is left; in less if it would crowd out the others' activations."""
        before, plans = self.sums, [each.plan for each in self.done.values()]
        for running, swapped in ((False, False), (True, False), (True, True)):
            # The budgets leave the headroom free already.
            memory = left_for(devices, before, running, swapped)
            request = replace(asked.request, memory=memory, headroom=DEFAULT_HEADROOM)
            plan = plan_model(asked.module.facts.path, [str(device) for device in devices], request)
            if not any(each.missing for each in sum_devices([*plans, plan], self.budgets, swap=self._swap)):
                break
        return plan
