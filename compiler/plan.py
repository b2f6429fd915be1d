"""Plan: who holds what, before anything is built."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

import onnx_ir as ir

from splitc.compiler.analysis import Analysis, analyze, check_divisible
from splitc.compiler.costs import NOMINAL
from splitc.compiler.memory import RangeMemory, StageMemory, stage_memory
from splitc.compiler.planner import OBJECTIVES, Assignment, StageCosts, Target, plan_stages
from splitc.compiler.shapes import Shape
from splitc.compiler.split.layer import Stage, split_layers
from splitc.runtime.devices import Device, free_bytes, parse_devices
from splitc.runtime.errors import DoesNotFitError, MisuseError
from splitc.runtime.units import parse_bytes

DEFAULT_HEADROOM = 1 << 30
# How much slower the slowest stage may be for fewer bytes cut and more even memory: times are not known better than
# that, where they were measured and where they are estimated.
SLACK_MEASURED, SLACK_ESTIMATED = 0.02, 0.1
# How many times its share of the weights (as budgets go) a device may hold, for the sake of speed.
UNEVEN = 1.6


@dataclass(frozen=True)
class Repeated:
    """What a stage computes again although an earlier one has it, since that is cheaper than to send it.

    The price is `flops` a run and `weights` bytes held twice; what is saved is `unsent` bytes a run.
    """

    nodes: int
    flops: int
    weights: int
    unsent: int


@dataclass(frozen=True)
class RankPlan:
    """One rank: its device, the bytes that it may use, its stage, and what that is predicted to hold and to take.

    `seconds` is the stage's time a run, measured or, as a rule, estimated.
    """

    device: Device
    budget: int
    stage: Stage
    memory: StageMemory
    seconds: float
    repeated: Repeated


@dataclass(frozen=True)
class CutPlan:
    """What crosses from the stages before a cut to those after it, and its bytes."""

    values: tuple[ir.Value, ...]
    bytes: int


@dataclass(frozen=True)
class Plan:
    """The decisions for one model: its ranks in pipeline order, the cuts between them, and what a user should know."""

    analysis: Analysis
    split_mode: str
    objective: str
    profiled: bool
    ranks: tuple[RankPlan, ...]
    cuts: tuple[CutPlan, ...]
    warnings: tuple[str, ...]


@dataclass(frozen=True)
class Request:
    """What a user asks of a plan.

    `tensor_split` gives the devices' shares of the weights on any scale. `memory` is budgets as the command line takes
    them (`4GiB`, `cpu0=4GiB`); without, a device's budget is its free memory less `headroom` bytes. `spread` gives
    every device a stage, even where fewer would do. `profile` measures blocks on the device instead of estimating.
    """

    split_mode: str = "layer"
    objective: str = "throughput"
    shapes: Mapping[str, Shape] | None = None
    tensor_split: Sequence[float] | None = None
    memory: Sequence[str] = ()
    headroom: int = DEFAULT_HEADROOM
    spread: bool = False
    profile: bool = False
    threads: int | None = None


def plan_model(model: str | Path, devices: Sequence[Device] | Sequence[str], request: Request = Request()) -> Plan:
    """Decide which blocks of the model each device holds. `devices` may be names, as in `["cpu0", "cpu1"]`.

    Raises MisuseError for a request that contradicts itself or the model, ModelError for a model that can't be used,
    DoesNotFitError when the devices can't hold it.
    """
    devices = parse_devices([str(device) for device in devices])
    if request.split_mode != "layer":
        raise MisuseError(f"unknown split mode '{request.split_mode}': there is layer")
    if request.objective not in OBJECTIVES:
        raise MisuseError(f"unknown objective '{request.objective}': there are {', '.join(OBJECTIVES)}")
    budgets = find_budgets(devices, request.memory, request.headroom)
    analysis = analyze(Path(model), request.shapes or {}, len(devices))
    if len(devices) > 1:
        check_divisible(analysis)
    seconds = block_seconds(analysis, devices, request)
    memory = RangeMemory(analysis.costs, analysis.states, analysis.partition)
    shares = _shares(request.tensor_split, len(devices))

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
    targets = [Target(str(device), share, budget) for device, share, budget in zip(devices, shares, budgets)]
    chosen = _choose(costs, targets, request)
    return make_plan(analysis, [devices[each.target] for each in chosen], chosen, budgets, seconds, request)


def _choose(costs: StageCosts, targets: Sequence[Target], request: Request) -> list[Assignment]:
    """The planner's choice; for throughput, with the weights spread evenly enough (see UNEVEN).

    In a convolutional network the first stages take the time and the last hold the weights: going by time alone, one
    device would be full and the others empty. Where blocks are too large for the limit, it is raised until they fit.
    """
    spread = request.spread or request.tensor_split is not None
    slack = SLACK_MEASURED if request.profile else SLACK_ESTIMATED
    uneven = UNEVEN if request.objective == "throughput" and not request.tensor_split else math.inf
    weights, available = costs.weights(0, len(costs.names)), sum(target.budget or 0 for target in targets)
    while uneven < len(targets):
        share = uneven * weights / max(1, available)
        limited = [replace(target, most_weights=int(share * (target.budget or 0))) for target in targets]
        with contextlib.suppress(DoesNotFitError):
            return plan_stages(costs, limited, objective=request.objective, spread=spread, slack=slack)
        uneven *= 1.25
    return plan_stages(costs, targets, objective=request.objective, spread=spread, slack=slack)


def make_plan(
    analysis: Analysis,
    devices: Sequence[Device],
    chosen: Sequence[Assignment],
    budgets: Sequence[int],
    seconds: Sequence[float],
    request: Request,
) -> Plan:
    """The plan that puts the chosen runs of blocks on the devices, one each, with all that follows from that."""
    stages = split_layers(analysis.graph, analysis.partition, [each.end for each in chosen])
    ranks = [
        RankPlan(
            device,
            budgets[each.target],
            stage,
            stage_memory(analysis.costs, analysis.states, stage),
            sum(seconds[each.start : each.end]),
            _repeated(analysis, stages, number),
        )
        for number, (device, each, stage) in enumerate(zip(devices, chosen, stages))
    ]
    return Plan(
        analysis,
        request.split_mode,
        request.objective,
        request.profile,
        tuple(ranks),
        tuple(_cuts(analysis, stages)),
        tuple(_warnings(analysis, ranks)),
    )


def find_budgets(devices: Sequence[Device], memory: Sequence[str], headroom: int) -> list[int]:
    """Bytes that each rank may use. A later entry of `memory` overrides an earlier one. Raises MisuseError."""
    budgets = [max(0, free - headroom // len(devices)) for free in free_bytes(devices)]
    names = [str(device) for device in devices]
    for text in memory:
        name, _, amount = text.rpartition("=")
        if name and name not in names:
            raise MisuseError(f"--memory names '{name}', and the devices are {', '.join(names)}")
        size = parse_bytes(amount)
        budgets = [size if not name or name == other else budget for other, budget in zip(names, budgets)]
    return budgets


def _shares(tensor_split: Sequence[float] | None, count: int) -> list[float]:
    if tensor_split is None:
        return [1.0] * count
    if len(tensor_split) != count:
        raise MisuseError(f"--tensor-split has {len(tensor_split)} shares, and there are {count} devices")
    if min(tensor_split) <= 0:
        raise MisuseError("--tensor-split takes shares above 0: leave a device out with -d to give it nothing")
    return list(tensor_split)


def block_seconds(analysis: Analysis, devices: Sequence[Device], request: Request) -> list[float]:
    """The time of each block, measured where the request says so."""
    if request.profile:
        from splitc.compiler.profile import measure_blocks

        return measure_blocks(analysis, devices, request.threads)
    speed = NOMINAL[devices[0].kind]
    return [sum(analysis.costs.seconds(node, speed) for node in block.nodes) for block in analysis.partition.blocks]


def _repeated(analysis: Analysis, stages: Sequence[Stage], number: int) -> Repeated:
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


def _cuts(analysis: Analysis, stages: Sequence[Stage]) -> list[CutPlan]:
    """For each cut the values that pass it: made before it, and received after it."""
    cuts = []
    for number in range(1, len(stages)):
        made = {value for stage in stages[:number] for value in stage.sends}
        values = dict.fromkeys(value for stage in stages[number:] for value in stage.receives if value in made)
        cuts.append(CutPlan(tuple(values), sum(map(analysis.costs.value_bytes, values))))
    return cuts


def _warnings(analysis: Analysis, ranks: Sequence[RankPlan]) -> list[str]:
    """What makes the plan's numbers less than certain."""
    found = []
    if uncertain := sorted(analysis.costs.bound.uncertain):
        found.append(
            f"the sizes of {len(uncertain)} values depend on data ({uncertain[0]}, ...): memory and time are too low"
        )
    for number, rank in enumerate(ranks):
        if rank.memory.total > rank.budget:
            found.append(f"rank {number} needs more than the budget of {rank.device}")
    return found
