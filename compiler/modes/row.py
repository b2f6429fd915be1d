"""Row mode: the main device runs the model, and all devices hold slices of its large matmul weights.

Matrices are sliced by output features, which Megatron calls column-parallel. The name is llama.cpp's, where a matrix
with N outputs has N rows.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import onnx_ir as ir

from splitc.compiler.analysis.facts import Analysis
from splitc.compiler.analysis.memory import StageMemory, stage_memory
from splitc.compiler.analysis.stages import Stage, divide_blocks
from splitc.compiler.errors import CannotSplitError
from splitc.compiler.execution.exchange import Round
from splitc.compiler.lowering.programs import names, rank_program
from splitc.compiler.lowering.row_graphs import find_rounds, product_stage, row_graph
from splitc.compiler.lowering.segments import engine_segments
from splitc.compiler.modes.mode import Mode, Way, WholeValues
from splitc.compiler.planning.assembly import assemble, check_memory
from splitc.compiler.planning.clock import Clock, Prediction, block_seconds, find_pace
from splitc.compiler.planning.host_groups import single_groups
from splitc.compiler.planning.measured import as_measured
from splitc.compiler.planning.plan import Plan
from splitc.compiler.planning.plan_file import PlanFile, check_file_shares, check_stages
from splitc.compiler.planning.rank_plan import CutPlan, RankPlan
from splitc.compiler.planning.resources import Budget, Resources, as_shares
from splitc.compiler.planning.split import RankProgram
from splitc.compiler.planning.stage_search import Assignment
from splitc.compiler.remembered import remembered
from splitc.compiler.request.request import Request
from splitc.compiler.sharding.choice import Choice
from splitc.compiler.sharding.products import Product, Products, SlicedProducts, find_products, slice_products
from splitc.compiler.sharding.report import sliced_weights
from splitc.compiler.sharding.sharded_model import held_shards
from splitc.compiler.trials.trial import broken_rules, find_broken
from splitc.runtime.errors import MisuseError
from splitc.runtime.hardware.devices import parse_devices, threads_for
from splitc.runtime.units import first_few, format_bytes

# Minimum share of the model's weights that can be sliced: less does not justify round trips in each block. A choice: of
# 11 models four can slice nothing, one 0.01, and six more than 0.3.
LEAST_SHARE = 0.1
# How many weights, and how many kinds of readers, the error names if too little can be sliced.
NAMED, KINDS = 5, 3
# About the number of nodes for each product that send its input, receive its result, and join its columns.
PASSING = 3


@dataclass(frozen=True)
class RowSplit(WholeValues):
    """The main rank runs the model. Each rank has slices of matrices of at least `row_min` x `row_min`."""

    sliced: SlicedProducts
    row_min: int
    rewrites = True
    whole = "on the main device"

    @property
    def collectives(self) -> int:
        return len(self.sliced.rounds)

    def exchanged(self, cuts: Sequence[CutPlan]) -> list[int]:
        return [cut.bytes for cut in cuts]

    def more_sessions(self, rank: RankPlan, inside: bool) -> int:
        if inside:
            return 0
        rounds = len(self.sliced.rounds)
        return 2 * rounds if rank.part == 0 else rounds - 1

    def predict(self, ranks: Sequence[RankPlan], cuts: Sequence[CutPlan], clock: Clock) -> Prediction:
        """The main rank's own work, and for each round, the slowest rank's slices and the values sent both ways.

        The main rank waits for the others, so requests of a stream do not overlap.
        """
        main, *others = ranks
        own = [node for node in main.stage.nodes if node.outputs[0].name not in self.sliced.products]
        total = clock.seconds(main, own, 1) + clock.feeding(main)
        link = max((clock.copy(main, other) for other in others), key=lambda link: link.latency)
        unlike = clock.unlike(ranks, self.sliced.columns.owned_sizes)
        for products in self.sliced.rounds:
            nodes = [product.node for product in products]
            slowest = max(clock.seconds(rank, nodes, len(ranks), partial(self._share, rank.part)) for rank in unlike)
            total += clock.meeting(slowest) * max(1.0, clock.crowd(ranks))
            total += 2 * (link.latency + clock.cold(main) + (0.0 if clock.operators else clock.start(main)))
        # To be joined, received columns are copied once more.
        results = (product.result for product in self.sliced.products.values())
        joined = sum(map(self.analysis.costs.value_bytes, results))
        latency = total + sum(self.exchanged(cuts)) * link.per_byte + clock.copying(main, joined)
        return Prediction(latency, latency)

    def _share(self, part: int, node: ir.Node) -> float:
        """A rank's share of a node's work."""
        product = self.sliced.products.get(node.outputs[0].name or "")
        return 1.0 if product is None else self.sliced.share(part, product)

    def program(self, ranks: Sequence[RankPlan], number: int, engine: str) -> RankProgram:
        stage = ranks[0].stage
        graph = row_graph(self.sliced, stage, number)
        outputs = [] if number else names(stage.outputs)
        segments = engine_segments(graph, outputs, engine, [rank.device for rank in ranks])
        return rank_program(segments, range(len(ranks)), () if number else stage.feeds, outputs)

    def file_fields(self) -> Mapping[str, Any]:
        return {"row_min": self.row_min}


def plan_rows(analysis: Analysis, resources: Resources, request: Request) -> Plan:
    """Plan which slices of the large matmul weights each device holds. The main device, rank 0, holds the rest too.

    Raises MisuseError for fewer than two devices or an unknown main device, CannotSplitError if too little can be
    sliced or a device would get nothing, DoesNotFitError if a rank needs more than its budget.
    """
    count = len(resources.devices)
    if count < 2:
        raise MisuseError(f"row mode needs two devices or more, and there is {count}")
    order = _main_first(resources, request)
    shares = None if request.tensor_split is None else [request.tensor_split[number] for number in order]
    return _make_plan(analysis, resources.take(order), request, shares)


def _main_first(resources: Resources, request: Request) -> list[int]:
    """The devices' indices, the main device's first, followed by those of its host."""
    numbers = list(range(len(resources.devices)))
    if request.main_device is None:
        return numbers
    named = parse_devices([request.main_device])
    if len(named) > 1 or named[0] not in resources.devices:
        raise MisuseError(
            f"--main-device names '{request.main_device}', and the devices are "
            f"{first_few([str(device) for device in resources.devices])}"
        )
    main = resources.devices.index(named[0])
    own = resources.devices[main].host
    # Ranks of a host are numbered consecutively, as by MPI.
    return sorted(numbers, key=lambda number: (number != main, resources.devices[number].host != own))


def _make_plan(analysis: Analysis, resources: Resources, request: Request, shares: Sequence[float] | None) -> Plan:
    """The plan that slices weights by the shares. The first share is the main device's.

    By default the shares are the free memory that each budget leaves (`_shares_of_free_memory`).
    """
    devices, budgets = resources.devices, resources.budgets
    stage = _whole(analysis)
    products, broken = _products(analysis, request.row_min)
    _check_enough_to_slice(analysis, products, request.row_min)
    if shares is None:
        shares = _shares_of_free_memory(analysis, stage, products, budgets)
    sliced = _slice(analysis, products, [float(share) for share in shares])
    _check_slices(sliced, resources, shares)
    seconds = _rank_seconds(analysis, resources, sliced)
    # Most ranks have as many columns, and so as much memory, as an earlier one; the main rank also has all else.
    columns = [(number == 0, sliced.columns.owned_sizes(number)) for number in range(len(devices))]
    alike = [columns.index(own) for own in columns]
    stages = {number: _rank_stage(analysis, sliced, stage, number) for number in {*alike}}
    memories = {number: _sliced_memory(analysis, sliced, stage, number) for number in {*alike}}
    memories[0] = as_measured(analysis, resources, 0, stage.blocks, memories[0])
    crossing = {number: _crossing(analysis, sliced, number) for number in {*alike[1:]}}
    ranks = [
        RankPlan(device, budget, float(share), stages[like], 0, number, memories[like], seconds[number])
        for number, (device, budget, share, like) in enumerate(zip(devices, budgets, shares, alike, strict=True))
    ]
    weights = sliced_weights(analysis, products, sliced.columns)
    cuts = [crossing[number] for number in alike[1:]]
    plan = assemble(analysis, request, RowSplit(analysis, sliced, request.row_min), ranks, cuts, weights)
    check_memory(plan)
    return replace(plan, warnings=(*plan.warnings, *broken_rules(broken)))


@remembered
def _products(analysis: Analysis, least: int) -> tuple[Products, Mapping[ir.Node, str]]:
    """The products that can be sliced, and the nodes that are not sliced since their rules did not hold when tried."""
    opaque: dict[ir.Node, str] = {}
    while True:
        products = find_products(analysis, least, opaque)
        columns = tuple(dict.fromkeys(product.columns for product in products.sliceable))
        broken = find_broken(analysis, products.axis_map, Choice(columns))
        if not broken:
            return products, opaque
        opaque.update(broken)


def _slice(analysis: Analysis, products: Products, shares: Sequence[float]) -> SlicedProducts:
    """The products sliced by the shares, in rounds, without those whose columns all stay on the main rank."""
    columns = slice_products(analysis, products, shares)
    sliced = [product for product in products.sliceable if product.columns in columns.ranges]
    return SlicedProducts(analysis.graph, _rounds(analysis, tuple(sliced)), columns)


@remembered
def _rounds(analysis: Analysis, products: tuple[Product, ...]) -> tuple[tuple[Product, ...], ...]:
    return find_rounds(analysis.graph, _whole(analysis), products)


@remembered
def _whole(analysis: Analysis) -> Stage:
    """The stage of all blocks."""
    (stage,) = divide_blocks(analysis.graph, analysis.partition, [len(analysis.partition.blocks)])
    return stage


def _check_enough_to_slice(analysis: Analysis, products: Products, least: int) -> None:
    """Raise CannotSplitError if less than LEAST_SHARE can be sliced. The message names the readers of the weights."""
    halves = slice_products(analysis, products, [1.0, 1.0])
    weights = sliced_weights(analysis, products, halves)
    total = sum(weight.bytes for weight in weights)
    if not total:
        raise CannotSplitError("row mode can slice nothing of this model: it has no weights")
    divided = sum(weight.split for weight in weights)
    if divided >= LEAST_SHARE * total:
        return
    kinds: Counter[str] = Counter()
    for weight in analysis.costs.weights(analysis.graph.nodes):
        declined = [products.declined[node] for node in products.readers[weight] if node in products.declined]
        kinds[declined[0].kind if declined else "such matrices"] += analysis.costs.value_bytes(weight)
    read = ", ".join(f"{size / total:.0%} {kind}" for kind, size in kinds.most_common(KINDS) if size > 0.005 * total)
    whole = sorted((weight for weight in weights if weight.reason), key=lambda weight: -weight.bytes)
    listed = "\n".join(f"  {weight.name} {format_bytes(weight.bytes)}: {weight.reason}" for weight in whole[:NAMED])
    what = f"only {divided / total:.1%}" if divided else "nothing"
    raise CannotSplitError(
        f"row mode can slice {what} of this model's {format_bytes(total)} of weights: it takes those of matmuls inside "
        f"blocks, of {least} x {least} or more. The largest weights:\n{listed}\n"
        f"Its weights: {read}. Use --split-mode layer, or --fallback layer."
    )


def _shares_of_free_memory(
    analysis: Analysis, stage: Stage, products: Products, budgets: Sequence[Budget]
) -> list[float]:
    """Shares in proportion to what each budget leaves for slices, after all else that the device holds.

    If a budget is not known, shares are those of `as_shares`.
    """
    known = [budget for budget in budgets if budget is not None]
    if len(known) < len(budgets):
        return as_shares(budgets)
    count = len(budgets)
    split = _slice(analysis, products, [0.0, *[1.0] * (count - 1)])
    main = _sliced_memory(analysis, split, stage, 0).total
    takes = (product_stage(analysis.graph, products).receives for products in split.rounds)
    taken = max((sum(map(analysis.costs.value_bytes, values)) for values in takes), default=0)
    left = [max(0, budget - (taken if number else main)) for number, budget in enumerate(known)]
    return [float(share) for share in (left if any(left) else known if any(known) else [1] * count)]


def _check_slices(split: SlicedProducts, resources: Resources, shares: Sequence[float]) -> None:
    """Raise CannotSplitError if a device would have no column of any product."""
    for number in range(1, len(resources.devices)):
        if not split.of_rank(number):
            raise CannotSplitError(
                f"row mode leaves nothing for rank {number} ({resources.devices[number]}): its share is "
                f"{shares[number] / sum(shares):.2%}, less than one column of any weight. Leave it out with -d, give "
                "it a larger share (--tensor-split) or budget (--memory), or use --fallback layer."
            )


def _rank_stage(analysis: Analysis, split: SlicedProducts, stage: Stage, number: int) -> Stage:
    """A rank's stage: the whole model on the main rank; its products, with their blocks, on any other."""
    if number == 0:
        return stage
    own = split.of_rank(number)
    nodes = {product.node for product in own}
    blocks = [block for block in analysis.partition.blocks if nodes & analysis.partition.with_upstream(block)]
    return product_stage(analysis.graph, own, blocks)


def _crossing(analysis: Analysis, split: SlicedProducts, number: int) -> CutPlan:
    """The values that a rank exchanges with the main one in a run, in both directions, each once."""
    own, size = split.of_rank(number), analysis.costs.value_bytes
    takes = dict.fromkeys(value for product in own for value in product.takes)
    gives = {product.result: int(size(product.result) * split.share(number, product)) for product in own}
    return CutPlan(tuple({**takes, **gives}), sum(map(size, takes)) + sum(gives.values()))


def _rank_seconds(analysis: Analysis, resources: Resources, split: SlicedProducts) -> list[float]:
    """Each rank's seconds for a run: a product's time is divided among the ranks by their columns."""
    threads = threads_for(resources.devices, resources.threads)
    pace, costs = find_pace(resources.devices[0], threads, len(resources.devices), resources.machine), analysis.costs
    whole = sum(block_seconds(analysis, resources, [0])[0])
    estimated = pace.seconds(costs, analysis.graph.nodes) or 1.0
    seconds = [0.0] * len(resources.devices)
    for product in split.products.values():
        share = pace.seconds(costs, [product.node]) / estimated
        for number in split.ranks(product):
            seconds[number] += whole * share * split.share(number, product)
    return [whole - sum(seconds[1:]), *seconds[1:]]


def _sliced_memory(analysis: Analysis, split: SlicedProducts, stage: Stage, number: int) -> StageMemory:
    """A rank's memory. The main rank holds everything except the other ranks' slices.

    Any other rank holds its slices, the inputs of its products, and its columns of their results.
    """
    own, count = split.of_rank(number), len(split.products)
    if number == 0:
        elsewhere = {product.node for product in split.products.values()} - {product.node for product in own}
        held = held_shards(analysis.costs, split.columns, [node for node in stage.nodes if node not in elsewhere], 0)
        states = analysis.states
    else:
        # Exchanged values are computed inside the engine.
        stage, states, count = replace(product_stage(analysis.graph, own), receives=(), sends=()), (), len(own)
        held = held_shards(analysis.costs, split.columns, stage.nodes, number)
    held = replace(held, size=analysis.costs.value_bytes, rounds=_rounds_of(split, number))
    memory = stage_memory(analysis.costs, states, stage, held)
    return replace(memory, nodes=memory.nodes + PASSING * count)


def _rounds_of(split: SlicedProducts, number: int) -> list[Round]:
    """A rank's products, sends and receives in each round."""
    works = [split.work(rank) for rank in range(split.columns.ranks)]
    rounds = []
    for (products, *others), own in zip(zip(split.rounds, *works[1:], strict=True), works[number], strict=True):
        of_rank = own.products if number else products
        shares = {one.node: {rank: split.share(rank, one) for rank in split.ranks(one)} for one in of_rank}
        sent = [] if number else [work.takes for work in others]
        rounds.append(Round(shares, sent, own.takes if number else (), number))
    return rounds


def _replan(
    analysis: Analysis, resources: Resources, request: Request, file: PlanFile, chosen: Sequence[Assignment]
) -> Plan:
    """The plan of a file. Only the main rank may have a share of 0."""
    check_stages(file.ranks, [0] * len(file.ranks), "in row mode there is one stage")
    check_file_shares(file.ranks, may_be_empty=1)
    return _make_plan(analysis, resources, request, [rank.share for rank in file.ranks])


def _ways(hosts: Sequence[int], numbers: Sequence[int]) -> list[Way]:
    """All numbers of devices from two on, including the main one."""
    return [Way(number) for number in single_groups(hosts, numbers)]


MODE = Mode(ways=_ways, plan=plan_rows, replan=_replan)
