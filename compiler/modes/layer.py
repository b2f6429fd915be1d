"""Layer mode: which blocks each device holds, and the plan that follows."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Sequence
from dataclasses import replace
from functools import cache

from splitc.compiler.analysis.facts import Analysis
from splitc.compiler.analysis.memory import RangeMemory, stage_memory
from splitc.compiler.lowering.stages import Stage, split_layers
from splitc.compiler.planning.budgets import Budget, as_shares, block_seconds
from splitc.compiler.planning.plan import CutPlan, Plan, RankPlan, Repeated, Request, assemble
from splitc.compiler.planning.stage_search import Assignment, StageCosts, Target, plan_stages
from splitc.runtime.devices import Device
from splitc.runtime.errors import DoesNotFitError

# How much slower the slowest stage may be for fewer bytes cut and more even memory: times are not known better than
# that, where they were measured and where they are estimated.
SLACK_MEASURED, SLACK_ESTIMATED = 0.02, 0.1
# How many times its share of the weights (as budgets go) a device may hold, for the sake of speed.
UNEVEN = 1.6


def plan_layers(analysis: Analysis, devices: Sequence[Device], budgets: Sequence[Budget], request: Request) -> Plan:
    """Decide which blocks each device holds.

    Raises DoesNotFitError when the devices can't hold the model, MisuseError for more devices than blocks.
    """
    seconds = block_seconds(analysis, devices, request)
    shares = request.tensor_split or [1.0] * len(devices)
    targets = [Target(str(device), share, budget) for device, share, budget in zip(devices, shares, budgets)]
    chosen = choose_stages(analysis, seconds, targets, request)
    return make_plan(analysis, [devices[each.target] for each in chosen], chosen, budgets, seconds, request)


def choose_stages(
    analysis: Analysis, seconds: Sequence[float], targets: Sequence[Target], request: Request
) -> list[Assignment]:
    """The runs of blocks that are best for the targets. `seconds` are the blocks' times."""
    memory = RangeMemory(analysis.costs, analysis.states, analysis.partition)

    def load(start: int, end: int) -> float:
        if request.tensor_split:  # users' shares are of the weights: that is what they see fill their devices
            return memory.weights(start, end)
        return sum(seconds[start:end])

    costs = StageCosts(
        names=[block.name for block in analysis.partition.blocks],
        load=load,
        weights=memory.weights,
        memory=cache(memory.total),  # the search asks for the same runs again for each target
        cut=memory.cut_bytes.__getitem__,
        link=lambda _: 0.0,  # CPU devices share their memory
    )
    return _choose(costs, targets, request)


def _choose(costs: StageCosts, targets: Sequence[Target], request: Request) -> list[Assignment]:
    """The planner's choice; for throughput, with the weights spread evenly enough (see UNEVEN).

    In a convolutional network the first stages take the time and the last hold the weights: going by time alone, one
    device would be full and the others empty. Where blocks are too large for the limit, it is raised until they fit.
    """
    spread = request.spread or request.tensor_split is not None
    slack = SLACK_MEASURED if request.profile else SLACK_ESTIMATED
    uneven = UNEVEN if request.objective == "throughput" and not request.tensor_split else math.inf
    weights, shares = costs.weights(0, len(costs.names)), as_shares([target.budget for target in targets])
    while uneven < len(targets):
        limited = [
            replace(target, most_weights=int(uneven * weights * share / sum(shares)))
            for target, share in zip(targets, shares)
        ]
        with contextlib.suppress(DoesNotFitError):
            return plan_stages(costs, limited, objective=request.objective, spread=spread, slack=slack)
        uneven *= 1.25
    return plan_stages(costs, targets, objective=request.objective, spread=spread, slack=slack)


def make_plan(
    analysis: Analysis,
    devices: Sequence[Device],
    chosen: Sequence[Assignment],
    budgets: Sequence[Budget],
    seconds: Sequence[float],
    request: Request,
) -> Plan:
    """The plan that puts the chosen runs of blocks on the devices, one each, with all that follows from that."""
    stages = split_layers(analysis.graph, analysis.partition, [each.end for each in chosen])
    ranks = [
        RankPlan(
            device,
            budgets[each.target],
            1.0,
            stage,
            number,
            0,
            stage_memory(analysis.costs, analysis.states, stage),
            sum(seconds[each.start : each.end]),
            repeated(analysis, stages, number),
        )
        for number, (device, each, stage) in enumerate(zip(devices, chosen, stages))
    ]
    return assemble(analysis, request, ranks, stage_cuts(analysis, stages))


def repeated(analysis: Analysis, stages: Sequence[Stage], number: int) -> Repeated:
    """What stage `number` has in common with those before it: free nodes, and weights that more than one reads."""
    costs = analysis.costs
    before = {node for stage in stages[:number] for node in stage.nodes}
    again = [node for node in stages[number].nodes if node in before]
    held = set(costs.weights(before))
    weights = sum(costs.value_bytes(weight) for weight in costs.weights(stages[number].nodes) if weight in held)
    own = (node for block in stages[number].blocks for node in block.nodes)
    read = {value for node in own for value in analysis.graph.reads[node] if value.producer() in before}
    unsent = sum(costs.value_bytes(value) for value in read if value not in stages[number].receives)
    return Repeated(len(again), sum(map(costs.flops, again)), weights, unsent)


def stage_cuts(analysis: Analysis, stages: Sequence[Stage]) -> list[CutPlan]:
    """For each cut the values that pass it: made before it, and received after it."""
    cuts = []
    for number in range(1, len(stages)):
        made = {value for stage in stages[:number] for value in stage.sends}
        values = dict.fromkeys(value for stage in stages[number:] for value in stage.receives if value in made)
        cuts.append(CutPlan(tuple(values), sum(map(analysis.costs.value_bytes, values))))
    return cuts
