"""Tensor mode: groups of devices that share each block, and what each rank of a group holds."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import onnx_ir as ir

from splitc.compiler.analysis import Analysis
from splitc.compiler.budgets import Budget, as_shares, block_seconds
from splitc.compiler.graph import ModelError
from splitc.compiler.memory import HeldParts, stage_memory
from splitc.compiler.plan import Plan, RankPlan, Repeated, Request, plan_warnings
from splitc.compiler.plan_layer import choose_stages, repeated, stage_cuts
from splitc.compiler.planner import Assignment, Target
from splitc.compiler.split.layer import Stage, split_layers
from splitc.compiler.split.report import SplitWeight, split_weights
from splitc.compiler.split.tensor import TensorSplit, split_tensors
from splitc.runtime.devices import Device
from splitc.runtime.engines.kinds import choose_engine
from splitc.runtime.errors import DoesNotFitError, MisuseError
from splitc.runtime.units import format_bytes

# Less than this share of the blocks' weight bytes split is said aloud.
WORTHWHILE = 0.5


def plan_tensors(analysis: Analysis, devices: Sequence[Device], budgets: Sequence[Budget], request: Request) -> Plan:
    """Decide which blocks each group of devices runs, and what each device has of them.

    Raises ModelError when nothing of the model can be split, MisuseError when the devices can't be divided into groups
    of two or more, DoesNotFitError when a rank needs more than its budget.
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
    _check_memory(plan)
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
        analysis.graph, analysis.shapes, analysis.costs.bound, analysis.costs.value_bytes, groups, home
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
                    part,
                    stage_memory(analysis.costs, analysis.states, stage, held_parts(analysis, split, stage, part)),
                    sum(seconds[each.start : each.end]) * shares[place] / sum(groups[each.target]),
                    repeated(analysis, stages, number) if part == 0 else Repeated(0, 0, 0, 0),
                )
            )
    weights = split_weights(analysis, split)
    warnings = [*plan_warnings(analysis, ranks), *_split_warnings(weights)]
    return Plan(
        analysis,
        request.split_mode,
        choose_engine(request.engine, devices),
        request.objective,
        request.profile,
        tuple(ranks),
        tuple(stage_cuts(analysis, stages)),
        tuple(warnings),
        split,
        tuple(weights),
    )


def held_parts(analysis: Analysis, split: TensorSplit, stage: Stage, part: int) -> HeldParts:
    """What one rank of a group holds of a stage's weights and values."""
    shards = split.shards(part)
    nodes = set(stage.nodes)
    size = analysis.costs.value_bytes
    parts: dict[tuple[ir.Value, bytes], int] = {}
    for node, operation in split.axis_map.operations.items():
        for value, axes in zip(node.inputs, operation.inputs) if node in nodes else ():
            if value is not None and value.is_initializer():
                parts[value, shards.key(axes)] = int(size(value) * shards.share(axes))
    weights: dict[ir.Value, int] = dict.fromkeys(analysis.costs.weights(nodes), 0)
    for (value, _), held in parts.items():
        weights[value] += held
    for value in weights:  # what only subgraphs read is whole
        weights[value] = weights[value] or size(value)
    return HeldParts(weights, lambda value: int(size(value) * shards.share(split.axes(value))))


def _split_warnings(weights: Sequence[SplitWeight]) -> list[str]:
    """Say when little is split. Raises ModelError when nothing is."""
    total = sum(each.bytes for each in weights)
    if not any(each.split for each in weights):
        reasons = dict.fromkeys(f"  {each.name}: {each.reason}" for each in weights if each.reason)
        listed = "\n".join(list(reasons)[:5])
        raise ModelError(
            f"tensor mode can split nothing of this model ({format_bytes(total)} of weights):\n{listed}\n"
            "Use --split-mode layer."
        )
    inside = [each for each in weights if each.in_block]
    held, divided = sum(each.bytes for each in inside), sum(each.split for each in inside)
    if divided < WORTHWHILE * held:
        return [
            f"only {divided / held:.0%} of the blocks' weights could be split ({format_bytes(divided)} of "
            f"{format_bytes(held)}): the rest is whole on each rank"
        ]
    return []


def _total(budgets: Iterable[Budget]) -> Budget:
    """What a group may use; None where that is not known of one of its devices."""
    known = list(budgets)
    return None if None in known else sum(budget or 0 for budget in known)


def _check_memory(plan: Plan) -> None:
    """Raise DoesNotFitError for the rank that lacks most."""
    lacking, number = max((rank.missing, number) for number, rank in enumerate(plan.ranks))
    if not lacking:
        return
    rank = plan.ranks[number]
    whole = sum(each.bytes - each.split for each in plan.weights)
    lines = [
        f"  rank {n} {r.device}: {format_bytes(r.memory.total)} of {format_bytes(r.budget)}"
        for n, r in enumerate(plan.ranks)
    ]
    raise DoesNotFitError(
        f"rank {number} ({rank.device}) needs {format_bytes(rank.memory.total)} and may use "
        f"{format_bytes(rank.budget)}, {format_bytes(lacking)} short; {format_bytes(whole)} of weights can't be split "
        "and are whole on each rank:\n"
        + "\n".join(lines)
        + "\nGive the devices more memory (--memory, --headroom), add one (-d), give this one a smaller share "
        "(--tensor-split), or plan for smaller inputs (--shapes)."
    )
