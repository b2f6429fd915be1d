"""What modes with stages share: the choice of cuts, what stages repeat, and a pipeline's time."""

from __future__ import annotations

import contextlib
import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import replace

import onnx_ir as ir

from splitc.compiler.analysis.facts import Analysis
from splitc.compiler.analysis.range_memory import RangeMemory
from splitc.compiler.analysis.stages import Stage
from splitc.compiler.planning.clock import Clock, Prediction
from splitc.compiler.planning.measured import beyond_predicted, block_activations
from splitc.compiler.planning.rank_plan import CutPlan, RankPlan, Rematerialized
from splitc.compiler.planning.resources import Resources, as_shares
from splitc.compiler.planning.stage_search import Assignment, StageCosts, Target, plan_stages
from splitc.compiler.remembered import remembered
from splitc.compiler.request.request import Request
from splitc.runtime.errors import DoesNotFitError

# The share of time by which the slowest stage may be slower, so that fewer bytes cross cuts and weights are spread more
# evenly: times are no more exact than that. With estimates, 0.05 gives 38 and 0.2 gives 39 of 43 models the same plan.
SLACK_MEASURED, SLACK_ESTIMATED = 0.02, 0.1
# To be faster, a device may hold this many times its share of the weights, which is proportional to budgets. A choice:
# with 1.3 the plans of 38 of 43 models on two devices are the same, with 2.5 those of 42, all but a U-Net's.
UNEVEN = 1.6


def choose_stages(
    analysis: Analysis,
    seconds: Sequence[Sequence[float]],
    targets: Sequence[Target],
    request: Request,
    resources: Resources,
) -> list[Assignment]:
    """The best ranges of blocks for the targets. `seconds` are the times of the blocks on each target."""
    between_hosts = resources.machine.between_hosts(resources.devices[0], resources.devices[-1])
    memory = _range_memory(analysis)

    # A user's shares are shares of the weights, since these fill devices.
    kinds = list(dict.fromkeys(map(tuple, seconds)))
    loads = [memory.weights] if request.tensor_split else [_sums(kind) for kind in kinds]
    if not request.tensor_split:
        targets = [replace(target, load=kinds.index(tuple(own))) for target, own in zip(targets, seconds, strict=True)]
    kinds_at = {device.kind: place for place, device in enumerate(resources.devices)}
    measured = [own for at in kinds_at.values() if (own := block_activations(analysis, resources, at)) is not None]

    def beyond(start: int, end: int) -> int:
        return max((beyond_predicted(own[start:end]) for own in measured), default=0)

    costs = StageCosts(
        names=[block.name for block in analysis.partition.blocks],
        loads=loads,
        weights=memory.weights,
        memory=lambda start, end: memory.at_least(start, end) + beyond(start, end),
        exact=lambda start, end: memory.exact(start, end) + beyond(start, end),
        cut=memory.cut_bytes.__getitem__,
        link=lambda size, far: between_hosts.seconds(size) if far else 0.0,  # CPU devices share their memory
    )
    return _spread_stages(costs, targets, request)


def _sums(seconds: Sequence[float]) -> Callable[[int, int], float]:
    """A function that returns the sum over a range of blocks."""
    before = list(itertools.accumulate(seconds, initial=0.0))
    return lambda start, end: before[end] - before[start]


@remembered
def _range_memory(analysis: Analysis) -> RangeMemory:
    return RangeMemory(analysis.costs, analysis.states, analysis.partition)


def _spread_stages(costs: StageCosts, targets: Sequence[Target], request: Request) -> list[Assignment]:
    """The best stages; for throughput, with the weights spread evenly enough (see UNEVEN).

    In a convolutional network the first blocks take most of the time, and the last ones have most of the weights: by
    time alone, one device would be full and the others nearly empty. The limit is raised until the blocks fit.
    """
    spread = request.spread or request.tensor_split is not None
    slack = SLACK_MEASURED if request.profile else SLACK_ESTIMATED
    uneven = UNEVEN if request.objective == "throughput" and not request.tensor_split else math.inf
    weights, shares = costs.weights(0, len(costs.names)), as_shares([target.budget for target in targets])
    while uneven < len(targets):
        limited = [
            replace(target, most_weights=int(uneven * weights * share / sum(shares)))
            for target, share in zip(targets, shares, strict=True)
        ]
        with contextlib.suppress(DoesNotFitError):
            return plan_stages(costs, limited, objective=request.objective, spread=spread, slack=slack)
        uneven *= 1.25  # a choice: smaller steps are more searches
    return plan_stages(costs, targets, objective=request.objective, spread=spread, slack=slack)


def rematerialized(analysis: Analysis, stages: Sequence[Stage]) -> list[Rematerialized]:
    """What each stage repeats of earlier stages: rematerialized nodes, and weights that they read too."""
    costs, reads = analysis.costs, analysis.graph.reads
    before: set[ir.Node] = set()
    held: set[ir.Value] = set()
    repeated = []
    for stage in stages:
        again = [node for node in stage.nodes if node in before]
        own = costs.held(stage.nodes)
        weights = sum(size for weight, size in own.items() if weight in held)
        inside = (node for block in stage.blocks for node in block.nodes)
        read = {value for node in inside for value in reads[node] if value.producer() in before}
        unsent = sum(costs.value_bytes(value) for value in read.difference(stage.receives))
        repeated.append(Rematerialized(len(again), sum(map(costs.flops, again)), weights, unsent))
        before.update(stage.nodes)
        held.update(own)
    return repeated


def predict_pipeline(
    ranks: Sequence[RankPlan],
    cuts: Sequence[CutPlan],
    clock: Clock,
    stage_seconds: Callable[[Sequence[RankPlan], int], float],
) -> Prediction:
    """The times of a pipeline: stages run one after the other for a request, and at the same time for a stream.

    `stage_seconds` returns the seconds of a stage's ranks, while a number of ranks work.
    """
    groups = sorted({rank.group for rank in ranks})
    members = [[rank for rank in ranks if rank.group == group] for group in groups]
    alone = [stage_seconds(group, len(group)) for group in members]
    # GPUs share nothing: each takes the same time whether or not others work.
    together = [stage_seconds(group, len(ranks)) for group in members] if clock.shares_cores else alone
    crossing = [
        clock.copy(before[0], after[0]).seconds(cut.bytes) + clock.cold(before[0])
        for before, after, cut in zip(members, members[1:], cuts, strict=False)
    ]
    slowest = max(map(sum, zip(together, [0.0, *crossing], strict=True)))
    # If a host's ranks need more than all its cores, they take turns, and the interval is the time of all their work.
    every = max(
        sum(
            seconds * min(1.0, clock.crowd([rank for rank in group if rank.device.host == host]))
            for seconds, group in zip(together, members, strict=True)
        )
        for host in {rank.device.host for rank in ranks}
    )
    return Prediction(sum(alone) + sum(crossing), max(slowest, every))
