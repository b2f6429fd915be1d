"""What is placed on devices of its own, in layer mode: its ranks' memory and time, and what goes there and back."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from itertools import accumulate

import onnx_ir as ir

from splitc.compiler.analysis.blocks import Placed
from splitc.compiler.analysis.costs import Costs
from splitc.compiler.analysis.facts import Analysis
from splitc.compiler.analysis.memory import Held, StageMemory, stage_memory
from splitc.compiler.analysis.stages import Stage
from splitc.compiler.errors import CannotSplitError
from splitc.compiler.lowering.transfers import Transfer, find_teams
from splitc.compiler.placement.placed import with_placed
from splitc.compiler.placement.relief import reliefs
from splitc.compiler.planning.clock import Clock, Prediction, find_pace
from splitc.compiler.planning.plan import Plan
from splitc.compiler.planning.rank_plan import CutPlan, RankPlan
from splitc.compiler.planning.resources import Resources
from splitc.runtime.errors import DoesNotFitError, MisuseError
from splitc.runtime.hardware.devices import Device, threads_for
from splitc.runtime.units import format_bytes


def take_placed(
    analysis: Analysis, devices: Sequence[Device], placed: Mapping[ir.Value, str]
) -> tuple[Analysis, list[int]]:
    """The analysis with placed weights out of the blocks, and the numbers of the devices that have blocks.

    Devices with placed weights have no blocks. If all have some, the first one has the blocks, and what was
    placed there stays in them.
    """
    names = [str(device) for device in devices]
    places = [place for place, name in enumerate(names) if name not in placed.values()] or [0]
    elsewhere = {weight: name for weight, name in placed.items() if names.index(name) not in places}
    return with_placed(analysis, elsewhere), places


def relieved(costs: Costs, resources: Resources, make: Callable[[Mapping[ir.Value, str]], Plan]) -> Plan | None:
    """A plan that `make` makes with experts and tables on one of the devices, as few as fit; None if none fits.

    The device with the largest budget comes first, and of several the last.
    """
    groups = reliefs(costs) if len(resources.devices) > 1 else []
    before = list(accumulate((sum(map(costs.value_bytes, group)) for group in groups), initial=0))
    roomy = sorted(range(len(resources.devices)), key=lambda place: (resources.budgets[place] or 0, place))
    for place in reversed(roomy):
        name, budget = str(resources.devices[place]), resources.budgets[place]

        def attempt(count: int, name: str = name) -> Plan | None:
            weights = [weight for group in groups[:count] for weight in group]
            with suppress(DoesNotFitError, CannotSplitError, MisuseError):
                plan = make(dict.fromkeys(weights, name))
                size = format_bytes(before[count])
                said = f"blocks alone do not fit: {len(weights)} weights of experts and tables, {size}, are on {name}"
                return replace(plan, warnings=(*plan.warnings, said))
            return None

        most = len(groups) if budget is None else bisect_right(before, budget) - 1
        if (plan := _least(attempt, most)) is not None:
            return plan
    return None


def _least(attempt: Callable[[int], Plan | None], most: int) -> Plan | None:
    """The plan of the least count that succeeds, of those up to about `most`; more succeed where fewer do."""
    high = next((count for count in (most, most - 1) if count > 0 and attempt(count) is not None), 0)
    low = 1
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if attempt(middle) is not None else (middle + 1, high)
    return attempt(high) if high else None


def place_of(placed: Placed, devices: Sequence[Device]) -> int:
    """The number of the device of what is placed."""
    return [str(device) for device in devices].index(placed.device)


def placed_seconds(analysis: Analysis, resources: Resources, place: int, stage: Stage) -> float:
    """The estimated seconds of a stage on the device at a place, which works while the others wait."""
    threads = threads_for(resources.devices, resources.threads)
    return find_pace(resources.devices[place], threads, 1, resources.machine).seconds(analysis.costs, stage.nodes)


def rank_memory(analysis: Analysis, stage: Stage, number: int, transfers: Sequence[Transfer]) -> StageMemory:
    """A rank's memory. What comes or goes while it runs is held only until its last reader, on whichever rank, has run.

    So the nodes of all ranks are gone through, and what this one does not have takes nothing.
    """
    costs = analysis.costs
    own = [transfer for transfer in transfers if transfer.inside and transfer.has(number)]
    if not own:
        return stage_memory(costs, analysis.states, stage)
    here = {*stage.takes, *(value for node in stage.nodes for value in node.outputs)}
    passing = {transfer.value for transfer in own}
    all_run = replace(
        stage,
        nodes=costs.graph.nodes,
        receives=tuple(value for value in stage.receives if value not in passing),
        sends=tuple(value for value in stage.sends if value not in passing),
    )
    return stage_memory(
        costs,
        analysis.states,
        all_run,
        Held(costs.held(stage.nodes), lambda value: costs.value_bytes(value) if value in here else 0),
    )


def detour_cuts(analysis: Analysis, transfers: Sequence[Transfer], first: int, count: int) -> list[CutPlan]:
    """For each rank from number `first` on what crosses between it and all others, in both directions."""
    cuts = []
    for number in range(first, count):
        values = [transfer.value for transfer in transfers if transfer.has(number)]
        cuts.append(CutPlan(tuple(dict.fromkeys(values)), sum(map(analysis.costs.value_bytes, values)), True))
    return cuts


def predict_detours(
    ranks: Sequence[RankPlan], transfers: Sequence[Transfer], clock: Clock, seconds: Callable[[RankPlan], float]
) -> Prediction:
    """The times of ranks with detours between them, whose own `seconds` are known.

    The ranks of a team work one after the other, and in a stream teams work side by side.
    """
    team = find_teams(len(ranks), transfers)
    busy = dict.fromkeys(team.values(), 0.0)
    for number, rank in enumerate(ranks):
        busy[team[number]] += seconds(rank)
    for transfer in transfers:
        source, target = ranks[transfer.source], ranks[transfer.target]
        size = clock.analysis.costs.value_bytes(transfer.value)
        took = clock.copy(source, target).seconds(size) + clock.cold(source)
        if transfer.inside and not clock.operators:
            took += clock.start(target)
        busy[team[transfer.target]] += took
    return Prediction(sum(busy.values()), max(busy.values()))
