"""Tensor mode: groups of devices that share each block, and what each rank of a group holds."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

from splitc.compiler.analysis.facts import Analysis
from splitc.compiler.analysis.memory import held_parts, stage_memory
from splitc.compiler.lowering.stages import split_layers
from splitc.compiler.model_errors import CannotSplitError
from splitc.compiler.modes.layer import choose_stages, repeated, stage_cuts
from splitc.compiler.planning.budgets import Budget, as_shares, block_seconds
from splitc.compiler.planning.plan import Plan, RankPlan, Repeated, Request, assemble, check_memory
from splitc.compiler.planning.stage_search import Assignment, Target
from splitc.compiler.sharding.report import SplitWeight, split_weights
from splitc.compiler.sharding.sharded_model import TensorSplit, split_tensors
from splitc.runtime.devices import Device
from splitc.runtime.errors import MisuseError
from splitc.runtime.units import format_bytes

# Where weights are that are not split.
WHOLE = "whole on each rank"


def plan_tensors(analysis: Analysis, devices: Sequence[Device], budgets: Sequence[Budget], request: Request) -> Plan:
    """Decide which blocks each group of devices runs, and what each device has of them.

    Raises CannotSplitError when nothing of the model can be split, MisuseError when the devices can't be divided into
    groups of two or more, DoesNotFitError when a rank needs more than its budget.
    """
    stages = request.pipeline_stages
    count = len(devices) // stages
    if len(devices) % stages or count < 2:
        raise MisuseError(
            f"tensor mode needs groups of two devices or more, all of one size: {len(devices)} devices in "
            f"{stages} stage{'s' * (stages > 1)} make none"
        )
    shares = request.tensor_split or as_shares(budgets)
    groups = [list(range(first, first + count)) for first in range(0, len(devices), count)]
    targets = [
        Target(f"group {number}", sum(shares[n] for n in group), _total(budgets[n] for n in group))
        for number, group in enumerate(groups)
    ]
    seconds = block_seconds(analysis, devices, request)
    if stages == 1:  # whether it fits is for each rank to say, once it is known what is split
        chosen = [Assignment(0, 0, len(analysis.partition.blocks))]
    else:
        chosen = choose_stages(analysis, seconds, targets, request)
    plan = make_tensor_plan(analysis, devices, budgets, [float(share) for share in shares], chosen, seconds, request)
    check_memory(plan, WHOLE)
    return plan


def make_tensor_plan(
    analysis: Analysis,
    devices: Sequence[Device],
    budgets: Sequence[Budget],
    shares: Sequence[float],
    chosen: Sequence[Assignment],
    seconds: Sequence[float],
    request: Request,
) -> Plan:
    """The plan that puts the chosen runs of blocks on groups of devices, which divide them by their shares."""
    count = len(devices) // request.pipeline_stages
    stages = split_layers(analysis.graph, analysis.partition, [each.end for each in chosen])
    home = {
        weight: each.target
        for each, stage in reversed(list(zip(chosen, stages)))
        for weight in analysis.costs.weights(stage.nodes)
    }
    groups = [shares[first : first + count] for first in range(0, len(devices), count)]
    split = split_tensors(
        analysis.graph, analysis.shapes, analysis.costs.certain, analysis.costs.value_bytes, groups, home
    )
    ranks = []
    for number, (each, stage) in enumerate(zip(chosen, stages)):
        for part in range(count):
            place = each.target * count + part
            ranks.append(
                RankPlan(
                    devices[place],
                    budgets[place],
                    shares[place],
                    stage,
                    number,
                    part,
                    stage_memory(
                        analysis.costs, analysis.states, stage, held_parts(analysis.costs, split, stage.nodes, part)
                    ),
                    sum(seconds[each.start : each.end]) * shares[place] / sum(groups[each.target]),
                    repeated(analysis, stages, number) if part == 0 else Repeated(0, 0, 0, 0),
                )
            )
    weights = split_weights(analysis, split)
    _check_split(weights)
    cuts = stage_cuts(analysis, stages)
    plan = assemble(analysis, request, ranks, cuts, tensor=split, weights=weights, whole=WHOLE)
    return replace(plan, warnings=(*plan.warnings, *_warn_of_idle(ranks, split)))


def _warn_of_idle(ranks: Sequence[RankPlan], split: TensorSplit) -> list[str]:
    """Say which ranks have no unit of anything, and so do what another one does too, or nothing."""
    idle = [part for part in range(split.ranks) if not any(each[part].counts for each in split.ranges.values())]
    return [
        f"rank {number} ({rank.device}) gets no unit of any axis: leave it out with -d, or give it a larger share "
        "(--tensor-split)"
        for number, rank in enumerate(ranks)
        if rank.part in idle
    ]


def _check_split(weights: Sequence[SplitWeight]) -> None:
    """Raise CannotSplitError when nothing is split."""
    if not any(each.split for each in weights):
        total = sum(each.bytes for each in weights)
        reasons = dict.fromkeys(f"  {each.name}: {each.reason}" for each in weights if each.reason)
        listed = "\n".join(list(reasons)[:5])
        raise CannotSplitError(
            f"tensor mode can split nothing of this model ({format_bytes(total)} of weights):\n{listed}\n"
            "Use --split-mode layer."
        )


def _total(budgets: Iterable[Budget]) -> Budget:
    """What a group may use; None where that is not known of one of its devices."""
    known = list(budgets)
    return None if None in known else sum(budget or 0 for budget in known)
