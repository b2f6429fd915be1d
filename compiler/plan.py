"""Plan: who holds what, before anything is built."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import onnx_ir as ir

from splitc.compiler.analysis import Analysis, analyze
from splitc.compiler.memory import StageMemory, stage_memory
from splitc.compiler.planner import StageCosts, Target, plan_stages
from splitc.compiler.shapes import Shape
from splitc.compiler.split.layer import Stage, split_layers
from splitc.runtime.devices import Device, free_bytes
from splitc.runtime.errors import MisuseError
from splitc.runtime.units import parse_bytes

DEFAULT_HEADROOM = 1 << 30


@dataclass(frozen=True)
class RankPlan:
    """One rank: its device, the bytes that it may use, its stage, and what that is predicted to hold."""

    device: Device
    budget: int
    stage: Stage
    memory: StageMemory


@dataclass(frozen=True)
class CutPlan:
    """What crosses from the stages before a cut to those after it, and its bytes."""

    values: tuple[ir.Value, ...]
    bytes: int


@dataclass(frozen=True)
class Plan:
    """The decisions for one model: its ranks in pipeline order, and the cuts between them."""

    analysis: Analysis
    split_mode: str
    ranks: tuple[RankPlan, ...]
    cuts: tuple[CutPlan, ...]


def plan_model(
    model: Path,
    devices: Sequence[Device],
    *,
    split_mode: str = "layer",
    shapes: Mapping[str, Shape] | None = None,
    tensor_split: Sequence[float] | None = None,
    memory: Sequence[str] = (),
    headroom: int = DEFAULT_HEADROOM,
) -> Plan:
    """Decide which blocks of the model each device holds.

    `tensor_split` gives the devices' shares on any scale, else they follow the budgets. `memory` is budgets as the
    command line takes them (`4GiB`, `cpu0=4GiB`); without, a device's budget is its free memory less `headroom`.

    Raises MisuseError for arguments that contradict each other or the model, ModelError for a model that can't be
    used, DoesNotFitError when the devices can't hold it.
    """
    if split_mode != "layer":
        raise MisuseError(f"unknown split mode '{split_mode}': there is layer")
    analysis = analyze(model, shapes or {}, len(devices))
    budgets = find_budgets(devices, memory, headroom)
    shares = _shares(tensor_split, budgets)
    targets = [Target(str(device), share, budget) for device, share, budget in zip(devices, shares, budgets)]
    ends = plan_stages(_stage_costs(analysis), targets)
    stages = split_layers(analysis.graph, analysis.partition, ends)
    ranks = [
        RankPlan(device, budget, stage, stage_memory(analysis, stage))
        for device, budget, stage in zip(devices, budgets, stages)
    ]
    return Plan(analysis, split_mode, tuple(ranks), tuple(_cuts(analysis, stages)))


def find_budgets(devices: Sequence[Device], memory: Sequence[str], headroom: int) -> list[int]:
    """Bytes that each rank may use. A later entry of `memory` overrides an earlier one. Raises MisuseError."""
    budgets = [max(0, free - headroom // len(devices)) for free in free_bytes(devices)]
    names = [str(device) for device in devices]
    for text in memory:
        name, _, amount = text.rpartition("=")
        if name and name not in names:
            raise MisuseError(f"--memory names '{name}', and the devices are {', '.join(names)}")
        budgets = [
            parse_bytes(amount) if not name or name == other else budget for other, budget in zip(names, budgets)
        ]
    return budgets


def _shares(tensor_split: Sequence[float] | None, budgets: Sequence[int]) -> list[float]:
    if tensor_split is None:
        return [max(1, budget) for budget in budgets]
    if len(tensor_split) != len(budgets):
        raise MisuseError(f"--tensor-split has {len(tensor_split)} shares, and there are {len(budgets)} devices")
    if min(tensor_split) <= 0:
        raise MisuseError("--tensor-split takes shares above 0: leave a device out with -d to give it nothing")
    return list(tensor_split)


def _stage_costs(analysis: Analysis) -> StageCosts:
    """Costs of runs of blocks, from sums over blocks; weights that blocks share count once in a stage."""
    blocks = analysis.partition.blocks
    costs = analysis.costs
    first_block = {node: number for number, block in enumerate(blocks) for node in block.nodes}
    weights = [costs.weights(analysis.partition.with_free(block)) for block in blocks]
    weight_bytes: dict[tuple[int, int], int] = {}
    for start in range(len(blocks)):
        seen: set[ir.Value] = set()
        total = 0
        for end in range(start, len(blocks)):
            new = [weight for weight in weights[end] if weight not in seen]
            seen.update(new)
            total += sum(costs.value_bytes(weight) for weight in new)
            weight_bytes[start, end + 1] = total
    crossing = [0] * (len(blocks) + 1)
    for node, number in first_block.items():
        for value in node.outputs:
            last = max((first_block.get(user, number) for user in value.consumers()), default=number)
            for cut in range(number + 1, last + 1):
                crossing[cut] += costs.value_bytes(value)
    peaks = [max((sum(map(costs.value_bytes, node.outputs)) for node in block.nodes), default=0) for block in blocks]
    return StageCosts(
        names=[block.name for block in blocks],
        load=lambda start, end: weight_bytes[start, end],
        memory=lambda start, end: weight_bytes[start, end] + max(peaks[start:end]) + crossing[start] + crossing[end],
        cut=lambda number: crossing[number],
    )


def _cuts(analysis: Analysis, stages: Sequence[Stage]) -> list[CutPlan]:
    """For each cut the values that pass it: made before it, and received after it."""
    cuts = []
    for number in range(1, len(stages)):
        made = {value for stage in stages[:number] for value in stage.sends}
        values = dict.fromkeys(value for stage in stages[number:] for value in stage.receives if value in made)
        cuts.append(CutPlan(tuple(values), sum(map(analysis.costs.value_bytes, values))))
    return cuts
