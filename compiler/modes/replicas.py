"""Replicas: groups of devices that each have the whole model, split in any mode, and divide the rows of a batch."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import msgspec
import numpy as np

from splitc.compiler.analysis.facts import Analysis
from splitc.compiler.modes.detours import block_places, take_placed
from splitc.compiler.modes.mode import Mode
from splitc.compiler.modes.rows import planned_rows, tried_rows, with_rows
from splitc.compiler.modes.table import BATCH
from splitc.compiler.placement.asked import asked_places
from splitc.compiler.placement.placed import on_devices
from splitc.compiler.planning.assembly import check_memory, memory_warnings, plan_warnings
from splitc.compiler.planning.clock import Clock, Prediction, block_seconds
from splitc.compiler.planning.host_groups import group_devices
from splitc.compiler.planning.plan import Plan, Replicas
from splitc.compiler.planning.plan_file import PlanFile
from splitc.compiler.planning.rank_plan import RankPlan
from splitc.compiler.planning.resources import Budget, Resources
from splitc.compiler.planning.stage_search import Assignment
from splitc.compiler.request.request import Request
from splitc.runtime.engines.kinds import choose_engine
from splitc.runtime.errors import DoesNotFitError, MisuseError
from splitc.runtime.feeds.rows import share_rows
from splitc.runtime.hardware.devices import Device, threads_for
from splitc.runtime.hardware.profiles import HOST
from splitc.runtime.units import plural


def predict_in_groups(plan: Plan, replicas: Replicas, clock: Clock) -> Prediction:
    """The slowest replica's times for its rows. If a request has fewer rows than replicas, some replicas are free.

    A request without rows, such as one with an empty list of images, takes no time.
    """
    at_work = sum(count > 0 for count in replicas.counts)
    if at_work == 0:
        return Prediction(0.0, 0.0)
    alone = _slowest(plan, replicas, clock, at_work)
    if at_work == len(replicas.counts):
        joining = _joining(plan.analysis, replicas, clock)
        return Prediction(alone.latency + joining, max(alone.interval, joining))
    together = _slowest(plan, replicas, clock, len(replicas.counts))
    return Prediction(alone.latency, together.interval * at_work / len(replicas.counts))


def _slowest(plan: Plan, replicas: Replicas, clock: Clock, at_work: int) -> Prediction:
    """The times of the slowest replica, while `at_work` replicas work."""
    predicted = []
    for number, (analysis, rows) in enumerate(zip(replicas.analyses, replicas.counts, strict=True)):
        if rows:
            own = [rank for rank in plan.ranks if rank.replica == number]
            busy = replace(clock, analysis=analysis, ranks=own, replicas=at_work)
            predicted.append(plan.split.predict(own, plan.cuts, busy))
    return Prediction(max(one.latency for one in predicted), max(one.interval for one in predicted))


def _joining(analysis: Analysis, replicas: Replicas, clock: Clock) -> float:
    """The seconds to divide the rows of inputs and to join those of outputs."""
    ends = (*analysis.graph.graph.inputs, *analysis.graph.outputs)
    cut = [value for value in ends if value.name in replicas.rows and value.name not in clock.states]
    return len(cut) * HOST.part + clock.copying(clock.ranks[0], sum(map(analysis.costs.value_bytes, cut)))


def plan_in_groups(mode: Mode, analysis: Analysis, resources: Resources, request: Request) -> Plan:
    """The plan in a mode, with as many replicas as the request and the mode ask for.

    Each group is inside a host if possible. The devices can be divided into equal groups (`check_groups`). Raises as
    `mode.plan` does, and CannotSplitError if the rows of a batch can't be divided.
    """
    groups = mode.groups(request, resources.devices)
    placed = asked_places(analysis.costs, resources.devices, request) if request.places_weights else {}
    if groups == 1:
        return mode.plan(take_placed(analysis, resources.devices, placed), resources, request)
    rows = tried_rows(analysis)
    size = len(resources.devices) // groups
    order = group_devices(resources.devices, resources.budgets, groups, size)
    resources = resources.take(order)
    tightest = _tightest(resources, size)
    names = _same_places(resources.devices, tightest.devices)
    analysis = take_placed(analysis, tightest.devices, {weight: names[device] for weight, device in placed.items()})
    asked = None if request.tensor_split is None else [request.tensor_split[place] for place in order]
    shares = _speeds(analysis, resources, tightest.devices) if asked is None else _sums(asked, size)
    if asked is not None:
        _check_inside(asked, size)
    inside = None if asked is None or size == 1 else asked[:size]
    alone = replace(request, batch_groups=1, tensor_split=inside)
    return _divided(analysis, resources, shares, rows, lambda own: mode.plan(own, tightest, alone))


def replan_in_groups(
    mode: Mode, analysis: Analysis, resources: Resources, request: Request, file: PlanFile, chosen: Sequence[Assignment]
) -> Plan:
    """The plan that a plan file describes, with its replicas. Raises as `mode.replan` does."""
    groups, count = file.batch_groups, len(file.ranks)
    if groups == 1:
        return mode.replan(analysis, resources, request, file, chosen)
    check_groups(request, count, groups)
    size = count // groups
    stages = [rank.stage for rank in file.ranks]
    if stages != stages[:size] * groups:
        raise MisuseError(f"the plan's ranks have the stages {stages}, which are not those of {groups} equal groups")
    rows = tried_rows(analysis)
    asked = [rank.share for rank in file.ranks]
    _check_inside(asked, size)
    tightest = _tightest(resources, size)
    analysis = on_devices(analysis, _same_places(resources.devices, tightest.devices))
    alone = msgspec.structs.replace(file, ranks=file.ranks[:size], batch_groups=1)

    def replan_one(own: Analysis) -> Plan:
        return mode.replan(own, tightest, request, alone, chosen)

    return _divided(analysis, resources, _sums(asked, size), rows, replan_one)


def _divided(
    analysis: Analysis,
    resources: Resources,
    shares: Sequence[float],
    rows: Mapping[str, int],
    plan_one: Callable[[Analysis], Plan],
) -> Plan:
    """The plan of all groups, which have these shares of the rows. `plan_one` plans a group for its rows.

    Raises DoesNotFitError if a rank needs more than its budget.
    """
    counts = share_rows(planned_rows(analysis, rows), shares)
    analyses = [with_rows(analysis, rows, max(1, own)) for own in counts]
    most = analyses[counts.index(max(counts))]
    try:
        plans = {own: plan_one(own) for own in dict.fromkeys((most, *analyses))}
    except DoesNotFitError as error:
        raise DoesNotFitError(
            f"{error}\nThese are the devices of one group. Each of the {len(counts)} groups holds the whole model "
            "(batch mode, --batch-groups), so each needs as much."
        ) from error
    replicas = Replicas(plans[most], tuple(shares), rows, tuple(counts), tuple(plans[own].analysis for own in analyses))
    plan = _joined(analysis, resources, replicas, [plans[own] for own in analyses])
    check_memory(plan)
    return plan


def _same_places(devices: Sequence[Device], group: Sequence[Device]) -> dict[str, str]:
    """For each device, the device at the same place in a group, by their names."""
    return {str(device): str(group[place % len(group)]) for place, device in enumerate(devices)}


def _speeds(analysis: Analysis, resources: Resources, group: Sequence[Device]) -> list[float]:
    """The groups' shares of the rows: the summed speed of their devices with blocks, relative to the first group's.

    `group` are the devices of the group that is planned.
    """
    own = block_places(analysis, group)
    places = [first + place for first in range(0, len(resources.devices), len(group)) for place in own]
    speeds = [1 / max(sum(seconds), 1e-12) for seconds in block_seconds(analysis, resources, places)]
    return _sums(speeds, len(own))


def _sums(shares: Sequence[float], size: int) -> list[float]:
    """The shares of groups of this size, relative to the first group's."""
    sums = [sum(shares[first : first + size]) for first in range(0, len(shares), size)]
    return [own / sums[0] for own in sums]


def _check_inside(shares: Sequence[float], size: int) -> None:
    """Raise MisuseError unless the shares of a group's devices are proportional to those in all other groups."""
    first = np.array(shares[:size])
    for start in range(size, len(shares), size):
        own = np.array(shares[start : start + size])
        if not np.allclose(own / own.sum(), first / first.sum()):
            given, other = (",".join(f"{share:g}" for share in group) for group in (first, own))
            raise MisuseError(
                f"the shares inside the groups differ, {given} and {other}: all groups hold the same, so give them in "
                "the same proportion, as in 3,1,3,1"
            )


def _tightest(resources: Resources, size: int) -> Resources:
    """The devices of the group with the least memory, each with the smallest budget at its place in any group."""
    budgets: list[Budget] = []
    for place in range(size):
        known = [budget for budget in resources.budgets[place::size] if budget is not None]
        budgets.append(min(known, default=None))
    starts = range(0, len(resources.devices), size)
    first = min(starts, key=lambda start: sum(budget or 0 for budget in resources.budgets[start : start + size]))
    threads = threads_for(resources.devices, resources.threads)  # the cores are divided among all groups
    return replace(resources.take(range(first, first + size)), budgets=tuple(budgets), threads=threads)


def _joined(analysis: Analysis, resources: Resources, replicas: Replicas, plans: Sequence[Plan]) -> Plan:
    """The plan of all groups, which hold the same as the first replica. `plans` are those of each for its rows."""
    first, count = replicas.first, len(replicas.first.ranks)
    ranks = _all_ranks(resources, replicas, plans)
    devices = [rank.device for rank in ranks]
    if choose_engine(None, devices) != choose_engine(None, devices[:count]):
        raise MisuseError(f"all groups run the same engines, and {', '.join(map(str, devices))} need different ones")
    unchecked = memory_warnings(first.ranks)
    others = [warning for warning in first.warnings if warning not in unchecked]
    warnings = dict.fromkeys((*plan_warnings(analysis, ranks), *others))
    names = _same_places([rank.device for rank in first.ranks], devices[:count])
    first = replace(
        first,
        analysis=on_devices(first.analysis, names),
        ranks=tuple(replace(rank, share=own.share) for rank, own in zip(ranks[:count], first.ranks, strict=True)),
    )
    partition = first.analysis.partition  # with placed weights, which do not depend on the number of rows
    return replace(
        first,
        analysis=replace(analysis, partition=partition) if partition.placed else analysis,
        ranks=tuple(ranks),
        warnings=tuple(warnings),
        replicas=replace(replicas, first=first),
    )


def _all_ranks(resources: Resources, replicas: Replicas, plans: Sequence[Plan]) -> list[RankPlan]:
    """The ranks of all groups on their own devices. A plan with other blocks than the first counts as the first."""
    first = replicas.first.ranks
    size = len(resources.devices) // len(plans)
    places = [resources.devices.index(rank.device) % size for rank in first]
    ranks = []
    for number, (plan, share) in enumerate(zip(plans, replicas.shares, strict=True)):
        same = [rank.stage.blocks for rank in plan.ranks] == [rank.stage.blocks for rank in first]
        for place, rank, own in zip(places, first, plan.ranks if same else first, strict=True):
            device, budget = resources.devices[number * size + place], resources.budgets[number * size + place]
            ranks.append(replace(own, device=device, budget=budget, share=rank.share * share, replica=number))
    return ranks


def check_groups(request: Request, count: int, groups: int) -> None:
    """Raise MisuseError unless this number of devices can be divided into equal groups."""
    if request.split_mode == BATCH and request.batch_groups not in (1, groups):
        raise MisuseError(
            f"--batch-groups is {request.batch_groups}, and in batch mode the {count} devices are {groups} groups: say "
            "with --split-mode how a group's devices share the model"
        )
    if request.split_mode == BATCH and groups == 1 < count:
        raise MisuseError(
            f"the {count} devices are one group with those that weights are placed on: name these for each group, in "
            "the same places, as in -d 'cuda0&cpu0&cuda1&cpu1' --experts cpu0, or use --split-mode layer"
        )
    if count % groups or groups > count:
        raise MisuseError(
            f"--batch-groups is {groups}, and {plural(count, 'device')} can't be divided into {groups} equal "
            "groups: name more or fewer devices with -d"
        )
    if request.places_weights and groups == count > 1:
        raise MisuseError(
            f"--batch-groups is {groups}, one for each device, and weights that are placed want another device in each "
            "group: name more devices with -d, or ask for fewer groups"
        )
