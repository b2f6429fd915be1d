"""Layer mode: consecutive blocks to each device (pipeline parallel)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from splitc.compiler.analysis.facts import Analysis
from splitc.compiler.analysis.memory import stage_memory
from splitc.compiler.analysis.stages import divide_blocks
from splitc.compiler.lowering.programs import names, stage_program
from splitc.compiler.lowering.segments import Segment
from splitc.compiler.lowering.stage_graph import stage_graph
from splitc.compiler.modes.mode import Mode, Way, WholeValues
from splitc.compiler.modes.pipeline import choose_stages, predict_pipeline, rematerialized, stage_cuts
from splitc.compiler.planning.assembly import assemble, check_memory, engine_bytes
from splitc.compiler.planning.clock import Clock, Prediction, block_seconds
from splitc.compiler.planning.plan import Plan
from splitc.compiler.planning.plan_file import PlanFile, check_stages
from splitc.compiler.planning.rank_plan import CutPlan, RankPlan
from splitc.compiler.planning.resources import Resources
from splitc.compiler.planning.split import RankProgram
from splitc.compiler.planning.stage_search import Assignment, Target
from splitc.compiler.request.request import Request
from splitc.runtime.engines.kinds import choose_engine
from splitc.runtime.errors import DoesNotFitError
from splitc.runtime.units import format_bytes


@dataclass(frozen=True)
class LayerSplit(WholeValues):
    """Each rank runs whole nodes. The model's computation is unchanged."""

    rewrites = False
    is_radial = False
    collectives = 0

    def exchanged_bytes(self, cuts: Sequence[CutPlan]) -> int:
        return 0

    def more_sessions(self, rank: RankPlan, inside: bool) -> int:
        return 0

    def predict(self, ranks: Sequence[RankPlan], cuts: Sequence[CutPlan], clock: Clock) -> Prediction:
        def stage_seconds(members: Sequence[RankPlan], at_once: int) -> float:
            (rank,) = members
            own = rank.seconds if clock.profiled else clock.seconds(rank, rank.stage.nodes, at_once)
            return own * max(1.0, clock.crowd(members)) + clock.feeding(rank) + clock.start(rank)

        return predict_pipeline(ranks, cuts, clock, stage_seconds)

    def program(self, ranks: Sequence[RankPlan], number: int, engine: str) -> RankProgram:
        stage = ranks[number].stage
        segment = Segment(stage_graph(self.analysis.graph, stage), ())
        return stage_program(ranks, number, [segment], names(stage.outputs))


def plan_layers(analysis: Analysis, resources: Resources, request: Request) -> Plan:
    """Decide which blocks each device holds.

    Raises DoesNotFitError if the devices can't hold the model, CannotSplitError if there are more devices than blocks.
    """
    devices = resources.devices
    seconds = block_seconds(analysis, resources, range(len(devices)))
    shares = request.tensor_split or [1.0] * len(devices)
    engine = choose_engine(request.engine, devices)
    targets = [
        Target(str(device), share, budget, engine_bytes(device, devices, engine), host=device.host)
        for device, share, budget in zip(devices, shares, resources.budgets, strict=True)
    ]
    chosen = choose_stages(analysis, seconds, targets, request, resources)
    plan = _make_plan(analysis, resources, request, chosen, seconds)
    check_memory(plan)
    return plan


def _make_plan(
    analysis: Analysis,
    resources: Resources,
    request: Request,
    chosen: Sequence[Assignment],
    seconds: Sequence[Sequence[float]],
) -> Plan:
    """The plan that puts the chosen runs of blocks on the devices, one run on each.

    `seconds` are the blocks' on each device.
    """
    stages = divide_blocks(analysis.graph, analysis.partition, [run.end for run in chosen])
    ranks = [
        RankPlan(
            resources.devices[run.target],
            resources.budgets[run.target],
            1.0,
            stage,
            number,
            0,
            stage_memory(analysis.costs, analysis.states, stage),
            sum(seconds[run.target][run.start : run.end]),
            again,
        )
        for number, (run, stage, again) in enumerate(zip(chosen, stages, rematerialized(analysis, stages), strict=True))
    ]
    return assemble(analysis, request, LayerSplit(analysis), ranks, stage_cuts(analysis, stages))


def replan_layers(
    analysis: Analysis, resources: Resources, request: Request, file: PlanFile, chosen: Sequence[Assignment]
) -> Plan:
    """The plan of a file. Raises DoesNotFitError, which names the blocks, if a rank needs more than its budget."""
    check_stages(file.ranks, range(len(file.ranks)), "in layer mode each rank is a stage of its own, in their order")
    seconds = block_seconds(analysis, resources, range(len(resources.devices)))
    plan = _make_plan(analysis, resources, request, chosen, seconds)
    for rank in plan.ranks:
        if rank.missing:
            need, have = format_bytes(rank.memory.total), format_bytes(rank.budget)
            first, last = rank.stage.blocks[0].name, rank.stage.blocks[-1].name
            raise DoesNotFitError(
                f"the plan puts {first} to {last} on {rank.device}, which needs {need} and may use {have}: "
                "move blocks to other ranks, or raise its budget_bytes"
            )
    return plan


def _ways(hosts: Sequence[int], numbers: Sequence[int]) -> list[Way]:
    """One stage on each device, for these numbers of devices."""
    return [Way(number, number) for number in numbers]


MODE = Mode(stages=lambda request, devices: devices, ways=_ways, plan=plan_layers, replan=replan_layers)
