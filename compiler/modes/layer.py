"""Layer mode (pipeline parallel): each device gets consecutive blocks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import onnx_ir as ir

from splitc.compiler.analysis.facts import Analysis
from splitc.compiler.analysis.stages import divide_blocks
from splitc.compiler.lowering.programs import names, stage_program
from splitc.compiler.lowering.segments import Segment, engine_segments, has_operators
from splitc.compiler.lowering.stage_graph import stage_graph
from splitc.compiler.lowering.transfers import Transfer, find_teams, find_transfers, with_transfers
from splitc.compiler.modes.detours import (
    block_places,
    find_cuts,
    placed_ranks,
    predict_detours,
    rank_memory,
    rank_seconds,
    relieved,
    take_placed,
)
from splitc.compiler.modes.mode import Mode, Way, WholeValues
from splitc.compiler.modes.pipeline import choose_stages, predict_pipeline, rematerialized
from splitc.compiler.planning.assembly import assemble, check_memory, engine_bytes, search_budget
from splitc.compiler.planning.clock import Clock, Prediction, block_seconds
from splitc.compiler.planning.measured import as_measured
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
    """Each rank runs whole nodes, so the model's computation is unchanged.

    `transfers` are those between all ranks. Transfers to placed weights and back run while engines run.
    """

    transfers: tuple[Transfer, ...] = ()
    whole = ""  # no weight is split

    @property
    def rewrites(self) -> bool:
        return bool(self._inside)

    @property
    def collectives(self) -> int:
        return len(self._inside)

    @cached_property
    def _inside(self) -> list[Transfer]:
        return [transfer for transfer in self.transfers if transfer.inside]

    def exchanged(self, cuts: Sequence[CutPlan]) -> list[int]:
        return [self.analysis.costs.value_bytes(transfer.value) for transfer in self._inside]

    def more_sessions(self, rank: RankPlan, inside: bool) -> int:
        return 0 if inside else sum(transfer.has(rank.group) for transfer in self._inside)

    def predict(self, ranks: Sequence[RankPlan], cuts: Sequence[CutPlan], clock: Clock) -> Prediction:
        if not self.analysis.partition.placed:
            return predict_pipeline(ranks, cuts, clock, lambda members, n: rank_seconds(members[0], clock, n))
        own = [rank_seconds(rank, clock) for rank in ranks]
        return predict_detours([[rank] for rank in ranks], self.transfers, clock, own)

    def program(self, ranks: Sequence[RankPlan], number: int, engine: str) -> RankProgram:
        stage, outputs = ranks[number].stage, names(ranks[number].stage.outputs)
        graph, devices = stage_graph(self.analysis.graph, stage), [rank.device for rank in ranks]
        team = find_teams(len(ranks), self._inside)
        group = [rank for rank in range(len(ranks)) if team[rank] == team[number]]
        if len(group) == 1:
            return stage_program(number, stage, [Segment(graph, ())], self.transfers, (), outputs)
        # Operators refer to ranks by their number within the group, steps by their number among all ranks.
        peers = group if has_operators(engine, devices) else list(range(len(ranks)))
        graph = with_transfers(graph, number, self._inside, {rank: peers.index(rank) for rank in group})
        sent = [transfer.value for transfer in self.transfers if transfer.source == number and not transfer.inside]
        segments = engine_segments(graph, {*outputs, *names(sent)}, engine, devices)
        return stage_program(number, stage, segments, self.transfers, group, outputs)


def plan_layers(analysis: Analysis, resources: Resources, request: Request) -> Plan:
    """Plan which blocks each device holds. Devices with placed weights have none.

    If the blocks do not fit, experts and tables are placed. Raises DoesNotFitError if the devices can't hold the model
    even then, CannotSplitError if there are more devices than blocks.
    """

    def place(placed: Mapping[ir.Value, str]) -> Plan:
        return _plan_blocks(take_placed(analysis, resources.devices, placed), resources, request)

    try:
        return _plan_blocks(analysis, resources, request)
    except DoesNotFitError:
        if request.places_weights or (plan := relieved(analysis.costs, resources, place)) is None:
            raise
        return plan


def _plan_blocks(analysis: Analysis, resources: Resources, request: Request) -> Plan:
    """The best plan with the weights placed as in the analysis. Raises as `plan_layers`."""
    devices = resources.devices
    places = block_places(analysis, devices)
    seconds = block_seconds(analysis, resources, range(len(devices)))
    if len(places) == 1 < len(devices):  # its memory is checked later, when the transfers are known
        chosen = [Assignment(places[0], 0, len(analysis.partition.blocks))]
    else:
        chosen = _find_ranges(analysis, resources.take(places), request, [seconds[place] for place in places], places)
    plan = _make_plan(analysis, resources, request, chosen, seconds)
    check_memory(plan)
    return plan


def _find_ranges(
    analysis: Analysis,
    resources: Resources,
    request: Request,
    seconds: Sequence[Sequence[float]],
    places: Sequence[int],
) -> list[Assignment]:
    """The best ranges of blocks for the devices that take blocks. `places` are their indices among all devices."""
    shares = [request.tensor_split[place] for place in places] if request.tensor_split else [1.0] * len(places)
    devices = resources.devices
    engine = choose_engine(request.engine, devices)
    targets = [
        Target(
            str(device),
            share,
            search_budget(request, device, budget),
            engine_bytes(device, devices, engine),
            host=device.host,
        )
        for device, share, budget in zip(devices, shares, resources.budgets, strict=True)
    ]
    chosen = choose_stages(analysis, seconds, targets, request, resources)
    return [replace(run, target=places[run.target]) for run in chosen]


def _make_plan(
    analysis: Analysis,
    resources: Resources,
    request: Request,
    chosen: Sequence[Assignment],
    seconds: Sequence[Sequence[float]],
) -> Plan:
    """The plan with the chosen ranges of blocks, one on each device, followed by the ranks of placed weights.

    `seconds` are the times of the blocks on each device.
    """
    partition = analysis.partition
    stages = divide_blocks(analysis.graph, partition, [run.end for run in chosen])
    transfers = find_transfers(stages, partition.position)
    own = [
        RankPlan(
            resources.devices[run.target],
            resources.budgets[run.target],
            1.0,
            stage,
            number,
            0,
            as_measured(analysis, resources, run.target, stage.blocks, rank_memory(analysis, stage, number, transfers)),
            sum(seconds[run.target][run.start : run.end]),
        )
        for number, (run, stage) in enumerate(zip(chosen, stages, strict=False))
    ]
    ranks = [
        replace(rank, rematerialized=again)
        for rank, again in zip(
            [*own, *placed_ranks(analysis, resources, stages, transfers)], rematerialized(analysis, stages), strict=True
        )
    ]
    cuts = find_cuts(analysis, stages, transfers)
    return assemble(analysis, request, LayerSplit(analysis, tuple(transfers)), ranks, cuts)


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


MODE = Mode(ways=_ways, plan=plan_layers, replan=replan_layers, stages=lambda request, devices: devices)
