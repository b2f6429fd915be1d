"""Row mode: the model on its main device, and slices of its large matmul weights on all."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import TypeVar

import onnx_ir as ir

from splitc.compiler.analysis.costs import NOMINAL
from splitc.compiler.analysis.facts import Analysis
from splitc.compiler.analysis.memory import StageMemory, held_parts, stage_memory
from splitc.compiler.lowering.exchange import find_rounds, product_stage
from splitc.compiler.lowering.stages import Stage, split_layers
from splitc.compiler.model_errors import CannotSplitError
from splitc.compiler.planning.budgets import Budget, as_shares, block_seconds
from splitc.compiler.planning.plan import CutPlan, Plan, RankPlan, Repeated, Request, assemble, check_memory
from splitc.compiler.sharding.report import sliced_weights
from splitc.compiler.sharding.row_split import LEAST_SIDE, Product, Products, RowSplit, find_products, slice_products
from splitc.runtime.devices import Device, parse_devices
from splitc.runtime.errors import MisuseError
from splitc.runtime.units import format_bytes

# Where weights are that are not sliced.
WHOLE = "on the main device"
# What can be sliced is this share of the model's weights or more: less is not worth a round trip in each block.
LEAST_SHARE = 0.1
# Weights, and kinds of operators, that are named where nothing can be sliced.
NAMED, KINDS = 5, 3

T = TypeVar("T")


def plan_rows(analysis: Analysis, devices: Sequence[Device], budgets: Sequence[Budget], request: Request) -> Plan:
    """Decide what of the large matmul weights each device holds; the main device comes first, and holds all else.

    Raises MisuseError for less than two devices or a main device that is none of them, CannotSplitError when there is
    too little to slice or a device would get nothing of it, DoesNotFitError when a rank needs more than its budget.
    """
    if len(devices) < 2:
        raise MisuseError(f"row mode needs two devices or more, and there is {len(devices)}")
    main = _find_main(devices, request)
    devices, budgets = _first(main, devices), _first(main, budgets)
    shares = None if request.tensor_split is None else _first(main, request.tensor_split)
    plan = make_row_plan(analysis, devices, budgets, shares, request)
    check_memory(plan, WHOLE)
    return plan


def _find_main(devices: Sequence[Device], request: Request) -> int:
    """The place of the main device."""
    if request.main_device is None:
        return 0
    named = parse_devices([request.main_device])
    if len(named) > 1 or named[0] not in devices:
        raise MisuseError(
            f"--main-device names '{request.main_device}', and the devices are {', '.join(map(str, devices))}"
        )
    return devices.index(named[0])


def _first(number: int, items: Sequence[T]) -> list[T]:
    """The items with that of a number before the others."""
    return [items[number], *items[:number], *items[number + 1 :]]


def make_row_plan(
    analysis: Analysis,
    devices: Sequence[Device],
    budgets: Sequence[Budget],
    shares: Sequence[float] | None,
    request: Request,
) -> Plan:
    """The plan that slices weights by the shares, the first of which is the main device's.

    Without shares they are what each budget leaves beside what the device must hold anyway.
    """
    (stage,) = split_layers(analysis.graph, analysis.partition, [len(analysis.partition.blocks)])
    products = find_products(analysis, request.row_min)
    _check_worth(analysis, products, request.row_min)
    if shares is None:
        shares = _free_shares(analysis, stage, products, budgets)
    split = _slice(analysis, stage, products, [float(share) for share in shares], request.row_min)
    _check_parts(split, devices, shares)
    seconds = _rank_seconds(analysis, devices, split, request)
    ranks = [
        RankPlan(
            device,
            budgets[number],
            float(shares[number]),
            _rank_stage(analysis, split, stage, number),
            0,
            number,
            _rank_memory(analysis, split, stage, number),
            seconds[number],
            Repeated(0, 0, 0, 0),
        )
        for number, device in enumerate(devices)
    ]
    weights = sliced_weights(analysis, products, split.columns)
    cuts = [_crossing(analysis, split, number) for number in range(1, len(devices))]
    return assemble(analysis, request, ranks, cuts, rows=split, weights=weights, whole=WHOLE)


def _slice(
    analysis: Analysis, stage: Stage, products: Products, shares: Sequence[float], least: int = LEAST_SIDE
) -> RowSplit:
    """The products sliced by the shares, in rounds; those that these leave to the main rank are none."""
    columns = slice_products(analysis.graph, products, shares, analysis.costs.value_bytes)
    sliced = [product for product in products.found if product.columns in columns.ranges]
    return RowSplit(analysis.graph, least, find_rounds(analysis.graph, stage, sliced), columns)


def _check_worth(analysis: Analysis, products: Products, least: int) -> None:
    """Raise CannotSplitError when nothing, or next to nothing, can be sliced, saying what reads the weights."""
    halves = slice_products(analysis.graph, products, [1.0, 1.0], analysis.costs.value_bytes)
    weights = sliced_weights(analysis, products, halves)
    total = max(1, sum(each.bytes for each in weights))
    divided = sum(each.split for each in weights)
    if divided >= LEAST_SHARE * total:
        return
    kinds: Counter[str] = Counter()
    for weight in analysis.costs.weights(analysis.graph.nodes):
        declined = [products.declined[node] for node in products.readers[weight] if node in products.declined]
        kinds[declined[0].kind if declined else "such matrices"] += analysis.costs.value_bytes(weight)
    read = ", ".join(f"{size / total:.0%} {kind}" for kind, size in kinds.most_common(KINDS) if size > 0.005 * total)
    whole = sorted((each for each in weights if each.reason), key=lambda each: -each.bytes)
    listed = "\n".join(f"  {each.name} {format_bytes(each.bytes)}: {each.reason}" for each in whole[:NAMED])
    what = f"only {divided / total:.1%}" if divided else "nothing"
    raise CannotSplitError(
        f"row mode can slice {what} of this model's {format_bytes(total)} of weights: it takes those of matmuls inside "
        f"blocks, of {least} x {least} or more. The largest weights:\n{listed}\n"
        f"Its weights: {read}. Use --split-mode layer, or --fallback layer."
    )


def _free_shares(analysis: Analysis, stage: Stage, products: Products, budgets: Sequence[Budget]) -> list[float]:
    """For each device what its budget leaves beside what it must hold without a slice; equal where one is unknown."""
    known = [budget for budget in budgets if budget is not None]
    if len(known) < len(budgets):
        return as_shares(budgets)
    count = len(budgets)
    split = _slice(analysis, stage, products, [0.0, *[1.0] * (count - 1)])
    main = _rank_memory(analysis, split, stage, 0).total
    takes = (product_stage(analysis.graph, each).receives for each in split.rounds)
    taken = max((_sum(analysis.costs.value_bytes, each) for each in takes), default=0)
    left = [max(0, budget - (taken if number else main)) for number, budget in enumerate(known)]
    return [float(each) for each in (left if any(left) else known if any(known) else [1] * count)]


def _check_parts(split: RowSplit, devices: Sequence[Device], shares: Sequence[float]) -> None:
    """Raise CannotSplitError when a device would have no column of anything."""
    for number in range(1, len(devices)):
        if not split.of_rank(number, list(split.products.values())):
            raise CannotSplitError(
                f"row mode leaves nothing for rank {number} ({devices[number]}): its share is "
                f"{shares[number] / sum(shares):.2%}, less than one column of any weight. Leave it out with -d, give "
                "it a larger share (--tensor-split) or budget (--memory), or use --fallback layer."
            )


def _rank_stage(analysis: Analysis, split: RowSplit, stage: Stage, number: int) -> Stage:
    """What a rank runs: the main one all of the model, the others products, with the blocks that these are of."""
    if number == 0:
        return stage
    own = split.of_rank(number, list(split.products.values()))
    nodes = {product.node for product in own}
    blocks = [block for block in analysis.partition.blocks if nodes & analysis.partition.with_free(block)]
    return product_stage(analysis.graph, own, blocks)


def _rank_memory(analysis: Analysis, split: RowSplit, stage: Stage, number: int) -> StageMemory:
    """What a rank holds: the main one all but the others' slices, those what they multiply and their columns of it."""
    costs = analysis.costs
    own = split.of_rank(number, list(split.products.values()))
    if number == 0:
        elsewhere = {product.node for product in split.products.values()} - {product.node for product in own}
        nodes = [node for node in stage.nodes if node not in elsewhere]
        held = replace(held_parts(costs, split.columns, nodes, 0), size=costs.value_bytes)
        memory = stage_memory(costs, analysis.states, stage, held)
        # The columns of all ranks, beside what they make together.
        results = ([product.result for product in products] for products in split.rounds)
        joined = max((_sum(costs.value_bytes, each) for each in results), default=0)
        return replace(memory, activations=memory.activations + joined)
    weights = held_parts(costs, split.columns, product_stage(analysis.graph, own).nodes, number).weights
    running = 0
    for products in split.rounds:
        takes, gives = _exchanged(analysis, split, number, products)
        running = max(running, _sum(costs.value_bytes, takes) + sum(gives.values()))
    return StageMemory(sum(weights.values()), running, 0, max(weights.values(), default=0))


def _exchanged(
    analysis: Analysis, split: RowSplit, number: int, products: Iterable[Product]
) -> tuple[list[ir.Value], dict[ir.Value, int]]:
    """What a rank takes for its columns of some products, and what it gives with the bytes of its columns."""
    own = split.of_rank(number, list(products))
    takes = list(dict.fromkeys(value for product in own for value in product.takes))
    gives = {each.result: int(analysis.costs.value_bytes(each.result) * split.share(number, each)) for each in own}
    return takes, gives


def _crossing(analysis: Analysis, split: RowSplit, number: int) -> CutPlan:
    """What passes between a rank and the main one in a run, both ways; what several rounds take is sent once."""
    takes, gives = _exchanged(analysis, split, number, split.products.values())
    crossing = _sum(analysis.costs.value_bytes, takes) + sum(gives.values())
    return CutPlan(tuple(dict.fromkeys([*takes, *gives])), crossing)


def _sum(size: Callable[[ir.Value], int], values: Iterable[ir.Value]) -> int:
    return sum(map(size, values))


def _rank_seconds(analysis: Analysis, devices: Sequence[Device], split: RowSplit, request: Request) -> list[float]:
    """Each rank's time a run: of the model's time products take a part, and of those each rank by its columns."""
    speed, costs = NOMINAL[devices[0].kind], analysis.costs
    whole = sum(block_seconds(analysis, devices, request))
    estimated = sum(costs.seconds(node, speed) for node in analysis.graph.nodes) or 1.0
    found = [0.0] * len(devices)
    for product in split.products.values():
        share = costs.seconds(product.node, speed) / estimated
        for number in split.ranks(product):
            found[number] += whole * share * split.share(number, product)
    return [whole - sum(found[1:]), *found[1:]]
