"""Tensor mode: the devices of a group share each block, and every rank runs its shard of it.

This is Megatron's tensor parallelism: matrices are column-, then row-parallel, with one all-reduce after each pair.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx_ir as ir

from splitc.compiler.analysis.facts import Analysis
from splitc.compiler.analysis.memory import StageMemory, stage_memory
from splitc.compiler.analysis.stages import divide_blocks
from splitc.compiler.errors import CannotSplitError
from splitc.compiler.frontend.shapes import BoundShapes
from splitc.compiler.lowering.engine_segments import engine_segments
from splitc.compiler.lowering.programs import kept_states, names, stage_program
from splitc.compiler.lowering.rank_graph import rank_graph
from splitc.compiler.lowering.transfers import rank_transfers
from splitc.compiler.modes.mode import Mode, Way
from splitc.compiler.modes.pipeline import choose_stages, predict_pipeline, rematerialized, stage_cuts
from splitc.compiler.modes.tensor_axes import Rates, TensorAxes, fast_axes, named_axes, small_axes
from splitc.compiler.nodes import describe_node
from splitc.compiler.planning.assembly import assemble, check_memory, search_budget
from splitc.compiler.planning.clock import Clock, Prediction, block_seconds, find_pace, sum_link
from splitc.compiler.planning.host_groups import group_devices, numbers_to_try, single_groups
from splitc.compiler.planning.measured import as_measured
from splitc.compiler.planning.plan import Plan
from splitc.compiler.planning.plan_file import PlanFile, check_file_shares
from splitc.compiler.planning.rank_plan import CutPlan, RankPlan, Rematerialized
from splitc.compiler.planning.resources import Budget, Resources
from splitc.compiler.planning.split import RankProgram
from splitc.compiler.planning.stage_search import Assignment, Target
from splitc.compiler.request.request import Request
from splitc.compiler.sharding.axis_map import AxisMap
from splitc.compiler.sharding.held import held_shards
from splitc.compiler.sharding.partial import chosen_atoms
from splitc.compiler.sharding.report import AxisFate, WeightFate, axis_fates, sharded_weights
from splitc.compiler.sharding.sharded_model import ShardedModel, shard_model
from splitc.compiler.trials.trial import broken_rules
from splitc.runtime.errors import DoesNotFitError, MisuseError
from splitc.runtime.hardware.devices import Device, threads_for
from splitc.runtime.hardware.profiles import HOST
from splitc.runtime.package.manifest import Part
from splitc.runtime.units import format_bytes

# Where unsharded weights are held, for messages.
WHOLE = "whole on each rank"


@dataclass(frozen=True)
class TensorSplit:
    """Every rank of a group runs every node of its stage on its shards. The group sums partial values."""

    analysis: Analysis
    axes: TensorAxes
    sharded: ShardedModel
    rewrites = True
    fixes_ranks = True
    is_radial = False

    @property
    def axis_map(self) -> AxisMap:
        return self.sharded.axis_map

    @property
    def probe_shapes(self) -> BoundShapes:
        return self.sharded.axis_map.bound

    @property
    def collectives(self) -> int:
        return self.sharded.sums.count

    def exchanged_bytes(self, cuts: Sequence[CutPlan]) -> int:
        return sum(map(self.analysis.costs.value_bytes, self.sharded.sums.exchanged))

    def more_sessions(self, rank: RankPlan, inside: bool) -> int:
        return 0 if inside else self.collectives

    def predict(self, ranks: Sequence[RankPlan], cuts: Sequence[CutPlan], clock: Clock) -> Prediction:
        stages = max(rank.group for rank in ranks) + 1
        return predict_pipeline(ranks, cuts, clock, lambda members, n: self._stage_seconds(members, n, stages, clock))

    def _stage_seconds(self, members: Sequence[RankPlan], at_once: int, stages: int, clock: Clock) -> float:
        """The seconds of one of `stages` stages: of its slowest rank, and of its collectives."""
        first = members[0]
        slowest = max(
            clock.seconds(rank, rank.stage.nodes, at_once, partial(self.sharded.share, rank.part))
            for rank in clock.unlike(members, self.sharded.sizes)
        )
        slowest = slowest * max(1.0, clock.crowd(members)) + clock.feeding(first)
        count = self.collectives / stages
        sums = clock.sums(members, count, self.exchanged_bytes(()) / stages)
        starts = 1 if clock.operators else count + 1
        return clock.meeting(slowest) + sums + starts * clock.start(first) + self._joining(clock) / stages

    def _joining(self, clock: Clock) -> float:
        """The seconds to cut sharded inputs and to join sharded outputs."""
        graph = self.analysis.graph.graph
        ends = (value for value in (*graph.inputs, *graph.outputs) if value.name not in clock.states)
        cut = [value for value in ends if self.sharded.shards(0).splits(self.sharded.axes(value))]
        size = sum(map(self.analysis.costs.value_bytes, cut))
        return len(cut) * HOST.part + clock.copying(clock.ranks[0], size)

    def program(self, ranks: Sequence[RankPlan], number: int, engine: str) -> RankProgram:
        rank, sharded = ranks[number], self.sharded
        outputs = [value.name or "" for value in rank.stage.outputs if self._gives(rank, value)]
        keeps = kept_states(self.analysis.states, rank, outputs)
        graph = rank_graph(sharded, rank.stage, rank.part)
        wanted = {*outputs, *keeps, *names(rank.stage.sends)}
        segments = engine_segments(graph, wanted, engine, [rank.device for rank in ranks])
        transfers = rank_transfers(ranks, self.analysis.partition.position)
        group = [place for place, other in enumerate(ranks) if other.group == rank.group]
        program = stage_program(number, rank.stage, segments, transfers, group, outputs)
        return replace(program, parts=tuple(self._parts(rank)), keeps=tuple(keeps))

    def _gives(self, rank: RankPlan, value: ir.Value) -> bool:
        """Whether the rank gives its shard of an output to the caller. The first rank gives replicated outputs."""
        ranges = self.sharded.ranges
        atoms = chosen_atoms(self.sharded.axes(value), ranges)
        return all(ranges[atom][rank.part].owned for atom in atoms) if atoms else rank.part == 0

    def _parts(self, rank: RankPlan) -> list[Part]:
        """The rank's shards of inputs and outputs that it has not all of."""
        shards = self.sharded.shards(rank.part)
        values = (*rank.stage.feeds, *rank.stage.outputs)
        parts = [shards.part(value.name or "", self.sharded.axes(value), value.shape) for value in values]
        return [part for part in parts if part is not None]

    def places(self, value: ir.Value, part: int) -> Mapping[int, npt.NDArray[np.int64]]:
        return self.sharded.shards(part).places(self.sharded.axes(value))

    def is_partial(self, value: ir.Value) -> bool:
        return value in self.sharded.sums.partial and value not in self.sharded.sums.summed

    def axis_fates(self) -> list[AxisFate]:
        return axis_fates(self.sharded, self.axes.choice, self.analysis.costs.value_bytes)

    def file_fields(self) -> Mapping[str, Any]:
        return {"islands": self.axes.islands}


def plan_tensors(analysis: Analysis, resources: Resources, request: Request) -> Plan:
    """Decide which blocks each group of devices runs, and which shards each device has.

    Groups are inside hosts where they can be. Raises CannotSplitError if nothing can be sharded, MisuseError if the
    devices can't be divided into equal groups of two or more, DoesNotFitError if a rank needs more than its budget.
    """
    stages, devices = request.pipeline_stages, resources.devices
    count = len(devices) // stages
    if len(devices) % stages or count < 2:
        raise MisuseError(
            f"tensor mode needs groups of two devices or more, all of one size: {len(devices)} devices in "
            f"{stages} stage{'s' * (stages > 1)} make none"
        )
    all_shares, order = (
        request.tensor_split or resources.shares,
        group_devices(devices, resources.budgets, stages, count),
    )
    resources, shares = resources.take(order), [all_shares[place] for place in order]
    targets = [
        Target(
            f"group {number}",
            sum(shares[first : first + count]),
            _total(search_budget(request, *own) for own in _with_budgets(resources)[first : first + count]),
            host=resources.devices[first].host,
        )
        for number, first in enumerate(range(0, len(devices), count))
    ]
    seconds = block_seconds(analysis, resources, range(0, len(devices), count))
    if stages == 1:  # each rank's memory is checked later, once it is known what is sharded
        chosen = [Assignment(0, 0, len(analysis.partition.blocks))]
    else:
        chosen = choose_stages(analysis, seconds, targets, request, resources)
    all_shares = [float(share) for share in shares]
    make = partial(_make_plan, analysis, resources, request, all_shares, chosen, seconds)
    fast = fast_axes(analysis, count, _rates(resources, count))
    try:
        return make(fast)
    except (CannotSplitError, DoesNotFitError) as error:
        small = small_axes(analysis, count)
        if small.islands == fast.islands or (isinstance(error, CannotSplitError) and request.fallback is not None):
            raise
        return make(small)


def _rates(resources: Resources, count: int) -> Rates:
    """How fast the first group of so many ranks works."""
    devices, machine = resources.devices[:count], resources.machine
    threads = threads_for(resources.devices, resources.threads)
    pace = find_pace(devices[0], threads, len(resources.devices), machine)
    return Rates(pace, sum_link(devices, machine))


def _make_plan(
    analysis: Analysis,
    resources: Resources,
    request: Request,
    shares: Sequence[float],
    chosen: Sequence[Assignment],
    seconds: Sequence[Sequence[float]],
    axes: TensorAxes,
) -> Plan:
    """The plan that puts the chosen runs of blocks on groups of devices, sharded by the devices' shares.

    `seconds` are the blocks' on each group.
    """
    count = len(resources.devices) // request.pipeline_stages
    stages = divide_blocks(analysis.graph, analysis.partition, [run.end for run in chosen])
    home = {
        weight: run.target
        for run, stage in reversed(list(zip(chosen, stages, strict=True)))
        for weight in analysis.costs.weights(stage.nodes)
    }
    groups = [shares[first : first + count] for first in range(0, len(shares), count)]
    sharded = shard_model(analysis.graph, axes.axis_map, axes.choice, groups, home)
    ranks = []
    repeated = rematerialized(analysis, stages)
    for number, (run, stage) in enumerate(zip(chosen, stages, strict=True)):
        memories: dict[tuple[int, ...], StageMemory] = {}  # most ranks have shards of the same sizes
        for part in range(count):
            place = run.target * count + part
            if (sizes := sharded.sizes(part)) not in memories:
                held = held_shards(analysis.costs, sharded, stage.nodes, part)
                memories[sizes] = stage_memory(analysis.costs, analysis.states, stage, held)
            rank = RankPlan(
                resources.devices[place],
                resources.budgets[place],
                shares[place],
                stage,
                number,
                part,
                as_measured(analysis, resources, place, stage.blocks, memories[sizes]),
                sum(seconds[run.target][run.start : run.end]) * shares[place] / sum(groups[run.target]),
                repeated[number] if part == 0 else Rematerialized(),
            )
            ranks.append(rank)
    weights = sharded_weights(analysis, sharded, axes.choice)
    _check_split(weights)
    _check_drawn(sharded)
    split = TensorSplit(analysis, axes, sharded)
    plan = assemble(analysis, request, split, ranks, stage_cuts(analysis, stages), weights, WHOLE)
    check_memory(plan, WHOLE)
    return replace(plan, warnings=(*plan.warnings, *_warn_if_idle(ranks, sharded), *broken_rules(axes.broken)))


def _warn_if_idle(ranks: Sequence[RankPlan], sharded: ShardedModel) -> list[str]:
    """Warnings for ranks that own no unit of any axis, and so only repeat what another rank does."""
    idle = [part for part in range(sharded.ranks) if not any(parts[part].owned for parts in sharded.ranges.values())]
    return [
        f"rank {number} ({rank.device}) gets no unit of any axis: leave it out with -d, or give it a larger share "
        "(--tensor-split)"
        for number, rank in enumerate(ranks)
        if rank.part in idle
    ]


def _check_split(weights: Sequence[WeightFate]) -> None:
    """Raise CannotSplitError if nothing is sharded."""
    if not any(weight.split for weight in weights):
        total = sum(weight.bytes for weight in weights)
        reasons = dict.fromkeys(f"  {weight.name}: {weight.reason}" for weight in weights if weight.reason)
        listed = "\n".join(list(reasons)[:5])
        raise CannotSplitError(
            f"tensor mode can split nothing of this model ({format_bytes(total)} of weights):\n{listed}\n"
            "Use --split-mode layer."
        )


def _check_drawn(sharded: ShardedModel) -> None:
    """Raise CannotSplitError if ranks can't be given the random numbers that one of them draws."""
    for value in sharded.sums.summed:
        node = value.producer()
        if not isinstance(value.type, ir.TensorType | None) or value.dtype == ir.DataType.STRING:
            assert node is not None
            raise CannotSplitError(
                f"{describe_node(node)} ({node.op_type}) draws random numbers, and gives '{value.name}', which is no "
                "tensor of numbers: the ranks can't hand it over to each other. Use --split-mode layer."
            )


def _with_budgets(resources: Resources) -> list[tuple[Device, Budget]]:
    return list(zip(resources.devices, resources.budgets, strict=True))


def _total(budgets: Iterable[Budget]) -> Budget:
    """The budget of a group in bytes; None if one of its devices' is not known."""
    all_budgets = list(budgets)
    return None if None in all_budgets else sum(budget or 0 for budget in all_budgets)


def _replan(
    analysis: Analysis, resources: Resources, request: Request, file: PlanFile, chosen: Sequence[Assignment]
) -> Plan:
    """The plan of a file. Raises MisuseError unless its ranks are equal groups, in the order of their stages."""
    numbers = [rank.stage for rank in file.ranks]
    count = len(numbers) // request.pipeline_stages
    if numbers != [stage for stage in range(request.pipeline_stages) for _ in range(count)] or count < 2:
        raise MisuseError(
            f"the plan's ranks have the stages {numbers}: tensor mode wants groups of one size, two or more, in order"
        )
    check_file_shares(file.ranks)
    shares = [rank.share for rank in file.ranks]
    seconds = block_seconds(analysis, resources, range(0, len(numbers), count))
    _check_islands(analysis, file)
    axes = named_axes(analysis, count, frozenset(file.islands))
    return _make_plan(analysis, resources, request, shares, chosen, seconds, axes)


def _check_islands(analysis: Analysis, file: PlanFile) -> None:
    """Raise MisuseError for an island of the plan that the model does not make."""
    computed = {value.name for node in analysis.graph.nodes for value in node.outputs}
    if unknown := [name for name in file.islands if name not in computed]:
        raise MisuseError(f'the plan has the line "{unknown[0]}" under "islands", and the model makes no such value')


def _ways(hosts: Sequence[int], numbers: Sequence[int]) -> list[Way]:
    """One group of some devices; all devices in equal groups; and groups that divide a host, on some of the hosts."""
    count, most = sum(hosts), hosts[0]
    single = [Way(number) for number in single_groups(hosts, numbers)]
    equal = [Way(count, stages) for stages in range(2, count // 2 + 1) if count % stages == 0]
    if len(hosts) == 1:
        return [*single, *equal]
    sizes = [size for size in range(2, most + 1) if any(host % size == 0 for host in hosts)]
    stages = [(size, sum(host // size for host in hosts[:few])) for size in sizes for few in numbers_to_try(len(hosts))]
    inside = [Way(size * groups, groups) for size, groups in stages if groups > 1]
    return list(dict.fromkeys([*single, *(way for way in equal if way.size <= most), *inside]))


MODE = Mode(stages=lambda request, devices: request.pipeline_stages, ways=_ways, plan=plan_tensors, replan=_replan)
