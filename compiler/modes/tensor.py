"""Tensor mode (tensor parallelism): each rank of a group runs its shard of every block.

As in Megatron, matrices are column-, then row-parallel, with one all-reduce after each pair.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial

import onnx_ir as ir

from splitc.compiler.analysis.facts import Analysis
from splitc.compiler.analysis.memory import StageMemory
from splitc.compiler.analysis.stages import Stage, divide_blocks
from splitc.compiler.errors import CannotSplitError
from splitc.compiler.lowering.transfers import Transfer, find_transfers
from splitc.compiler.modes.detours import block_places, find_cuts, placed_ranks, rank_memory
from splitc.compiler.modes.mode import Mode, Way
from splitc.compiler.modes.pipeline import choose_stages, rematerialized
from splitc.compiler.modes.tensor_axes import TensorAxes, fast_axes, named_axes, small_axes
from splitc.compiler.modes.tensor_split import TensorSplit
from splitc.compiler.nodes import describe_node
from splitc.compiler.planning.assembly import assemble, check_memory, search_budget
from splitc.compiler.planning.clock import block_seconds, find_pace, sum_link
from splitc.compiler.planning.host_groups import group_devices, numbers_to_try, single_groups
from splitc.compiler.planning.measured import as_measured
from splitc.compiler.planning.plan import Plan
from splitc.compiler.planning.plan_file import PlanFile, check_file_shares
from splitc.compiler.planning.rank_plan import RankPlan, Rematerialized
from splitc.compiler.planning.resources import Budget, Resources, as_shares
from splitc.compiler.planning.stage_search import Assignment, Target
from splitc.compiler.request.request import Request
from splitc.compiler.sharding.report import WeightSplit, sharded_share, sharded_weights
from splitc.compiler.sharding.sharded_model import ShardedModel, held_shards, rank_nodes, shard_model, summed_parts
from splitc.compiler.trials.trial import broken_rules
from splitc.runtime.errors import DoesNotFitError, MisuseError
from splitc.runtime.hardware.devices import Device, threads_for
from splitc.runtime.units import first_few, format_bytes, plural

# If less than this share of the blocks' weight bytes is sharded, all islands are, whatever their time: to shard only a
# head, a detector's last convolutions, or the vocabulary of a model whose products are quantized, is no tensor mode. A
# choice.
LEAST_SHARE = 0.25
# Why there is no plan with a fallback, though there would be one without.
SLOWER = "tensor mode splits this model only with collectives that take longer than they save"


def plan_tensors(analysis: Analysis, resources: Resources, request: Request) -> Plan:
    """Plan which blocks each group of devices runs, and which shards each device has.

    Each group is inside a host if possible. Devices with placed weights come last. Raises CannotSplitError if nothing
    can be sharded, MisuseError if the devices can't be divided into equal groups of two or more, DoesNotFitError if a
    rank needs more than its budget.
    """
    stages, places = request.pipeline_stages, block_places(analysis, resources.devices)
    count = len(places) // stages
    _check_groups(analysis, [resources.devices[place] for place in places], stages)
    all_shares, own = request.tensor_split or as_shares(resources.budgets), resources.take(places)
    order = [places[place] for place in group_devices(own.devices, own.budgets, stages, count)]
    apart = [place for place in range(len(resources.devices)) if place not in places]
    resources, shares = resources.take([*order, *apart]), [float(all_shares[place]) for place in order]
    seconds = block_seconds(analysis, resources, range(0, len(order), count))
    if stages == 1:  # each rank's memory is checked later, when the shards are known
        chosen = [Assignment(0, 0, len(analysis.partition.blocks))]
    else:
        chosen = choose_stages(analysis, seconds, _targets(resources, request, shares, count), request, resources)
    make = partial(_make_plan, analysis, resources, request, shares, chosen, seconds)
    threads = threads_for(resources.devices, resources.threads)
    pace = find_pace(resources.devices[0], threads, len(resources.devices), resources.machine)
    fast = fast_axes(analysis, count, pace, sum_link(resources.devices[:count], resources.machine))
    try:
        plan = make(fast)
    except (CannotSplitError, DoesNotFitError) as error:
        small = small_axes(analysis, count)
        if small.islands == fast.islands:
            raise
        if isinstance(error, CannotSplitError) and request.fallback is not None:
            raise CannotSplitError(SLOWER) from error
        return make(small)
    if _block_share(plan) >= LEAST_SHARE:
        return plan
    return _with_all_islands(plan, make, small_axes(analysis, count))


def _targets(resources: Resources, request: Request, shares: Sequence[float], count: int) -> list[Target]:
    """The groups of `count` devices, for which `shares` are given, as targets of the search over cuts."""
    budgets = list(map(partial(search_budget, request), resources.devices, resources.budgets))
    return [
        Target(
            f"group {number}",
            sum(shares[first : first + count]),
            _total(budgets[first : first + count]),
            host=resources.devices[first].host,
        )
        for number, first in enumerate(range(0, len(shares), count))
    ]


def _total(budgets: Sequence[Budget]) -> Budget:
    """The budget of a group in bytes; None if the budget of a device is not known."""
    return None if None in budgets else sum(budget or 0 for budget in budgets)


def _with_all_islands(plan: Plan, make: Callable[[TensorAxes], Plan], small: TensorAxes) -> Plan:
    """The plan with all islands, if that fits and shards more; else the given plan.

    In place of a plan with collectives it must come to LEAST_SHARE: beside large weights that can't be sharded, as of a
    recurrent network, islands of small ones are not worth more collectives.
    """
    with suppress(CannotSplitError, DoesNotFitError):
        other = make(small)
        share, least = _block_share(other), LEAST_SHARE if plan.split.collectives else 0.0
        return other if share > _block_share(plan) and share >= least else plan
    return plan


def _block_share(plan: Plan) -> float:
    """The share of the blocks' weight bytes that is sharded, or of all weights in a model without blocks."""
    of_blocks = [weight for weight in plan.weights if weight.in_block]
    return sharded_share(of_blocks or plan.weights)


def _make_plan(
    analysis: Analysis,
    resources: Resources,
    request: Request,
    shares: Sequence[float],
    chosen: Sequence[Assignment],
    seconds: Sequence[Sequence[float]],
    axes: TensorAxes,
) -> Plan:
    """The plan with the chosen ranges of blocks on groups of devices, sharded by the devices' shares.

    `seconds` are the times of the blocks on each group.
    """
    count = len(shares) // request.pipeline_stages
    stages = divide_blocks(analysis.graph, analysis.partition, [run.end for run in chosen])
    home = {
        weight: run.target
        for run, stage in reversed(list(zip(chosen, stages, strict=False)))
        for weight in analysis.costs.weights(stage.nodes)
    }
    groups = [shares[first : first + count] for first in range(0, len(shares), count)]
    sharded = shard_model(analysis.graph, axes.axis_map, axes.choice, groups, home)
    placed = analysis.partition.placed
    transfers = find_transfers(stages, analysis.graph.position) if placed else []
    ranks = []
    repeated = rematerialized(analysis, stages)
    for number, (run, stage) in enumerate(zip(chosen, stages, strict=False)):
        for part, memory in enumerate(_shard_memories(analysis, sharded, stage, number, transfers)):
            place = run.target * count + part
            rank = RankPlan(
                resources.devices[place],
                resources.budgets[place],
                shares[place],
                stage,
                number,
                part,
                as_measured(analysis, resources, place, stage.blocks, memory),
                sum(seconds[run.target][run.start : run.end]) * shares[place] / sum(groups[run.target]),
                repeated[number] if part == 0 else Rematerialized(),
            )
            ranks.append(rank)
    held_names = {weight.name for weight in home}
    weights = [weight for weight in sharded_weights(analysis, sharded, axes.choice) if weight.name in held_names]
    _check_split(weights)
    _check_drawn(sharded)
    cuts = find_cuts(analysis, stages, transfers)
    ranks += placed_ranks(analysis, resources, stages, transfers, group=0, part=count)
    split = TensorSplit(analysis, axes, sharded, tuple(transfers))
    plan = assemble(analysis, request, split, ranks, cuts, weights)
    check_memory(plan)
    return replace(plan, warnings=(*plan.warnings, *_warn_if_idle(ranks, sharded), *broken_rules(axes.broken)))


def _shard_memories(
    analysis: Analysis, sharded: ShardedModel, stage: Stage, number: int, transfers: Sequence[Transfer]
) -> list[StageMemory]:
    """The memory of each rank of a group with its shards of stage `number`."""
    memories = []
    known: dict[Hashable, StageMemory] = {}  # most ranks run the same nodes with shards of the same sizes
    for part in range(sharded.ranks):
        shard = rank_nodes(analysis, sharded, stage, part)
        own = sharded.sizes(part), shard.nodes, tuple(summed_parts(sharded, part).values())
        if own not in known:
            held = held_shards(analysis.costs, sharded, shard.nodes, part)
            known[own] = rank_memory(analysis, shard, number, transfers, held)
        memories.append(known[own])
    return memories


def _check_groups(analysis: Analysis, devices: Sequence[Device], stages: int) -> None:
    """Raise MisuseError unless the devices with blocks form equal groups, and a single one if weights are placed."""
    if analysis.partition.placed and stages > 1:
        raise MisuseError(
            f"--pipeline-stages is {stages}, and tensor mode places weights beside a single stage: leave it out, or "
            "use --split-mode layer"
        )
    count = len(devices)
    if count % stages or count < 2 * stages:
        raise MisuseError(
            f"tensor mode needs groups of two devices or more, all of one size: {plural(count, 'device')} for blocks "
            f"({first_few([str(device) for device in devices])}) in {plural(stages, 'stage')} "
            f"make{'s' * (count == 1)} none"
        )


def _warn_if_idle(ranks: Sequence[RankPlan], sharded: ShardedModel) -> list[str]:
    """Warnings for ranks that own no unit of any axis: they only repeat another rank's work."""
    idle = [part for part in range(sharded.ranks) if not any(parts[part].owned for parts in sharded.ranges.values())]
    return [
        f"rank {number} ({rank.device}) gets no part of any weight: leave it out with -d, or give it a larger share "
        "(--tensor-split)"
        for number, rank in enumerate(ranks)
        if rank.part in idle
    ]


def _check_split(weights: Sequence[WeightSplit]) -> None:
    """Raise CannotSplitError if nothing is sharded."""
    if not any(weight.split for weight in weights):
        if not weights:
            raise CannotSplitError("tensor mode can split nothing of this model: it has no weights")
        total = sum(weight.bytes for weight in weights)
        largest = sorted(weights, key=lambda weight: -weight.bytes)
        reasons = dict.fromkeys(f"  {weight.name}: {weight.reason}" for weight in largest if weight.reason)
        listed = "\n".join(list(reasons)[:5])
        raise CannotSplitError(
            f"tensor mode can split nothing of this model ({format_bytes(total)} of weights): the largest are\n"
            f"{listed}\nUse --split-mode layer."
        )


def _check_drawn(sharded: ShardedModel) -> None:
    """Raise CannotSplitError if a value drawn at random can't be sent from one rank to the others."""
    for value in sharded.sums.summed:
        node = value.producer()
        if not isinstance(value.type, ir.TensorType | None) or value.dtype == ir.DataType.STRING:
            assert node is not None
            raise CannotSplitError(
                f"{describe_node(node)} draws random numbers, and its output '{value.name}' is not a "
                "tensor of numbers, so that ranks can't send it to each other. Use --split-mode layer."
            )


def _replan(
    analysis: Analysis, resources: Resources, request: Request, file: PlanFile, chosen: Sequence[Assignment]
) -> Plan:
    """The plan of a file. Raises MisuseError unless its ranks are equal groups, in the order of their stages."""
    places = block_places(analysis, resources.devices)
    if places != list(range(len(places))):
        raise MisuseError("the plan has placed weights on ranks before those with blocks, which come first")
    _check_groups(analysis, resources.devices[: len(places)], request.pipeline_stages)
    numbers = [rank.stage for rank in file.ranks[: len(places)]]
    count = len(numbers) // request.pipeline_stages
    if numbers != [stage for stage in range(request.pipeline_stages) for _ in range(count)] or count < 2:
        raise MisuseError(
            f"the plan's ranks have the stages {numbers}: tensor mode wants groups of one size, two or more, in order"
        )
    check_file_shares(file.ranks)
    shares = [rank.share for rank in file.ranks[: len(places)]]
    seconds = block_seconds(analysis, resources, range(0, len(numbers), count))
    _check_islands(analysis, file)
    axes = named_axes(analysis, count, frozenset(file.islands))
    return _make_plan(analysis, resources, request, shares, chosen, seconds, axes)


def _check_islands(analysis: Analysis, file: PlanFile) -> None:
    """Raise MisuseError for an island of the plan that the model does not have."""
    computed = {value.name for node in analysis.graph.nodes for value in node.outputs}
    if unknown := [name for name in file.islands if name not in computed]:
        raise MisuseError(f'the plan has the line "{unknown[0]}" under "islands", and the model makes no such value')


def _ways(hosts: Sequence[int], numbers: Sequence[int]) -> list[Way]:
    """The ways: one group of some devices; all devices in equal groups; equal groups inside some of the hosts."""
    count, most = sum(hosts), hosts[0]
    single = [Way(number) for number in single_groups(hosts, numbers)]
    equal = [Way(count, stages) for stages in range(2, count // 2 + 1) if count % stages == 0]
    if len(hosts) == 1:
        return [*single, *equal]
    sizes = [size for size in range(2, most + 1) if any(host % size == 0 for host in hosts)]
    stages = [(size, sum(host // size for host in hosts[:few])) for size in sizes for few in numbers_to_try(len(hosts))]
    inside = [Way(size * groups, groups) for size, groups in stages if groups > 1]
    return list(dict.fromkeys([*single, *(way for way in equal if way.size <= most), *inside]))


MODE = Mode(ways=_ways, plan=plan_tensors, replan=_replan)
