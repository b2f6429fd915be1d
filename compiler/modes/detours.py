"""Placed weights, on other devices than their blocks: their ranks' memory and time, and the values that cross."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from itertools import accumulate

import onnx_ir as ir

from splitc.compiler.analysis.costs import Costs
from splitc.compiler.analysis.facts import Analysis
from splitc.compiler.analysis.memory import Held, StageMemory, stage_memory
from splitc.compiler.analysis.stages import Stage
from splitc.compiler.errors import CannotSplitError
from splitc.compiler.lowering.transfers import Transfer, find_teams
from splitc.compiler.placement.experts import reliefs
from splitc.compiler.placement.placed import with_placed
from splitc.compiler.planning.clock import Clock, Prediction, find_pace
from splitc.compiler.planning.measured import as_measured
from splitc.compiler.planning.plan import Plan
from splitc.compiler.planning.rank_plan import CutPlan, RankPlan
from splitc.compiler.planning.resources import Resources
from splitc.runtime.errors import DoesNotFitError, MisuseError
from splitc.runtime.hardware.devices import Device, threads_for
from splitc.runtime.units import format_bytes


def take_placed(analysis: Analysis, devices: Sequence[Device], placed: Mapping[ir.Value, str]) -> Analysis:
    """The analysis with placed weights taken out of the blocks.

    Devices with placed weights have no blocks. If all devices have placed weights, the first one has the blocks, with
    the weights that were placed there.
    """
    stays = str(devices[0]) if {*map(str, devices)} <= {*placed.values()} else None
    return with_placed(analysis, {weight: name for weight, name in placed.items() if name != stays})


def block_places(analysis: Analysis, devices: Sequence[Device]) -> list[int]:
    """The indices of the devices that have blocks."""
    placed = {own.device for own in analysis.partition.placed}
    return [place for place, device in enumerate(devices) if str(device) not in placed]


def relieved(costs: Costs, resources: Resources, make: Callable[[Mapping[ir.Value, str]], Plan]) -> Plan | None:
    """The plan, by `make`, that places the fewest experts and tables on one device; None if none fits.

    The device with the largest budget is tried first, the last one of equal ones.
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
    """The plan of the least count that succeeds, by bisection up to about `most`: larger counts succeed too."""
    high = next((count for count in (most, most - 1) if count > 0 and attempt(count) is not None), 0)
    fewer = range(1, high)
    return attempt(1 + bisect_left(fewer, True, key=lambda count: attempt(count) is not None)) if high else None


def placed_ranks(
    analysis: Analysis,
    resources: Resources,
    stages: Sequence[Stage],
    transfers: Sequence[Transfer],
    group: int | None = None,
    part: int = 0,
) -> list[RankPlan]:
    """The ranks of placed weights. Their stages are the last ones of `stages`, which `transfers` connect.

    Each rank is a group of its own; or all belong to `group`, numbered from `part` on.
    """
    first, threads = len(stages) - len(analysis.partition.placed), threads_for(resources.devices, resources.threads)
    ranks = []
    for number, placed in enumerate(analysis.partition.placed, first):
        place, stage = [str(device) for device in resources.devices].index(placed.device), stages[number]
        memory = rank_memory(analysis, stage, number, transfers)
        pace = find_pace(resources.devices[place], threads, 1, resources.machine)  # the others wait
        rank = RankPlan(
            resources.devices[place],
            resources.budgets[place],
            1.0,
            stage,
            number if group is None else group,
            0 if group is None else part + number - first,
            as_measured(analysis, resources, place, stage.blocks, memory),
            pace.seconds(analysis.costs, stage.nodes),
        )
        ranks.append(rank)
    return ranks


def rank_memory(
    analysis: Analysis, stage: Stage, number: int, transfers: Sequence[Transfer], held: Held | None = None
) -> StageMemory:
    """The memory of the rank with this `number`. `held` are its shards, if it has only these of its stage.

    A value that is sent or received while the rank runs is held only until its last reader has run, on any rank. So
    live ranges are determined as if the rank ran all ranks' nodes, and values that it does not have take no bytes.
    """
    costs = analysis.costs
    own = [transfer for transfer in transfers if transfer.inside and transfer.has(number)]
    if not own:
        return stage_memory(costs, analysis.states, stage, held)
    held = held or Held(costs.held(stage.nodes), costs.value_bytes, costs.shapes_of)
    here = {*stage.takes, *(value for node in stage.nodes for value in node.outputs)}
    passing = {transfer.value for transfer in own}
    all_run = replace(
        stage,
        nodes=costs.graph.nodes,
        receives=tuple(value for value in stage.receives if value not in passing),
        sends=tuple(value for value in stage.sends if value not in passing),
    )
    own_size = held.size
    memory = stage_memory(
        costs, analysis.states, all_run, replace(held, size=lambda value: own_size(value) if value in here else 0)
    )
    return replace(memory, nodes=costs.count_run(stage.nodes))


def find_cuts(analysis: Analysis, stages: Sequence[Stage], transfers: Sequence[Transfer]) -> list[CutPlan]:
    """For each cut between stages of blocks, the values that a stage before it sends to a stage after it.

    Then, for each device with placed weights, the values that it exchanges with all others, in both directions.
    """
    size, count = analysis.costs.value_bytes, len(stages) - len(analysis.partition.placed)
    cuts = []
    for number in range(1, count):
        sent = {value for stage in stages[:number] for value in stage.sends}
        values = dict.fromkeys(value for stage in stages[number:count] for value in stage.receives if value in sent)
        cuts.append(CutPlan(tuple(values), sum(map(size, values))))
    for number in range(count, len(stages)):
        exchanged = [transfer.value for transfer in transfers if transfer.has(number)]
        cuts.append(CutPlan(tuple(dict.fromkeys(exchanged)), sum(map(size, exchanged)), True))
    return cuts


def rank_seconds(rank: RankPlan, clock: Clock, at_once: int = 1) -> float:
    """The seconds of a rank that runs whole nodes, while `at_once` ranks work."""
    own = rank.seconds if clock.profiled else clock.seconds(rank, rank.stage.nodes, at_once)
    return own * max(1.0, clock.crowd([rank])) + clock.feeding(rank) + clock.start(rank)


def predict_detours(
    stages: Sequence[Sequence[RankPlan]], transfers: Sequence[Transfer], clock: Clock, seconds: Sequence[float]
) -> Prediction:
    """The times of a model with placed weights. `stages` are the ranks of each stage, and `seconds` its own time.

    Stages of a team work one after the other. In a stream of requests, teams work at the same time. A transfer to a
    stage goes to each of its ranks.
    """
    team = find_teams(len(stages), transfers)
    busy = dict.fromkeys(team.values(), 0.0)
    for number, own in enumerate(seconds):
        busy[team[number]] += own
    for transfer in transfers:
        source, targets = stages[transfer.source][0], stages[transfer.target]
        size = clock.analysis.costs.value_bytes(transfer.value)
        took = sum(clock.copy(source, target).seconds(size) + clock.cold(source) for target in targets)
        if transfer.inside and not clock.operators:
            took += clock.start(targets[0])
        busy[team[transfer.target]] += took
    return Prediction(sum(busy.values()), max(busy.values()))
