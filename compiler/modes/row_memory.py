"""The memory of ranks of row mode."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import onnx_ir as ir

from splitc.compiler.analysis.facts import Analysis
from splitc.compiler.analysis.loading import find_loading, packed_bytes
from splitc.compiler.analysis.memory import StageMemory, have_few_bits, stage_memory, with_adapters
from splitc.compiler.analysis.stages import Stage
from splitc.compiler.execution.arena import Arena, Place
from splitc.compiler.execution.rounds import Round
from splitc.compiler.lowering.row_slices import product_stage
from splitc.compiler.operators.registry import operator_of
from splitc.compiler.sharding.held import held_shards
from splitc.compiler.sharding.slices import SlicedProducts

# About how many nodes send and receive what a product takes and makes, and join its columns.
PASSING = 3


def sliced_memory(analysis: Analysis, split: SlicedProducts, stage: Stage, number: int) -> StageMemory:
    """A rank's memory. The main rank holds everything but the other ranks' slices.

    Any other rank holds its slices, the inputs of its products, and its columns of their results.
    """
    costs = analysis.costs
    own = split.of_rank(number, list(split.products.values()))
    if number == 0:
        elsewhere = {product.node for product in split.products.values()} - {product.node for product in own}
        nodes = [node for node in stage.nodes if node not in elsewhere]
        held = replace(held_shards(costs, split.columns, nodes, 0), size=costs.value_bytes, rounds=_rounds_of(split))
        memory = stage_memory(costs, analysis.states, stage, held)
        return replace(memory, nodes=memory.nodes + PASSING * len(split.products))
    multiplied = product_stage(analysis.graph, own).nodes
    held = held_shards(costs, split.columns, multiplied, number)
    weights = held.weights
    memory = StageMemory(
        packed_bytes(costs, multiplied, weights, held.shapes),
        _columns_peak(analysis, split, number),
        cache=0,
        loading=find_loading(costs, multiplied, weights, held.shapes),
        nodes=(1 + PASSING) * len(multiplied),
        few_bits=have_few_bits(weights),
    )
    return with_adapters(memory, costs, weights)


def _rounds_of(split: SlicedProducts) -> list[Round]:
    """What the main rank multiplies, sends and receives in each round."""
    works = [split.work(number) for number in range(1, split.columns.ranks)]
    return [
        Round(
            {one.node: {rank: split.share(rank, one) for rank in split.ranks(one)} for one in products},
            [work.takes for work in others],
        )
        for products, *others in zip(split.rounds, *works, strict=True)
    ]


def _columns_peak(analysis: Analysis, split: SlicedProducts, number: int) -> int:
    """The bytes that a rank beside the main one takes for its products' inputs and its columns of their results.

    On CPUs halves are singles in a product. ONNX Runtime goes depth first from the last round: what a later product
    reads may be there already, as an encoder's result is. It is computed at once, and its columns wait for their round.
    """
    size, works = analysis.costs.value_bytes, split.work(number)
    came = {value: number for number, work in enumerate(works) for value in work.takes}
    products = [product for work in works for product in work.products]
    readers = Counter(value for product in products for value in product.takes)
    costs, places = analysis.costs, dict[ir.Value, Place]()
    arena, single = Arena(on_host=costs.maps_weights), costs.value_in_memory
    for now, work in enumerate(works):
        came_to = [(value, arena.allocate(size(value))) for value in work.takes]
        if not now:
            arena.allocate(1)  # the token that chains what ranks exchange
        places.update((v, arena.turned(place, size(v), single(v, size(v), False))) for v, place in came_to)
        for product in reversed(products):
            if max((came[value] for value in product.takes), default=0) == now:
                columns = int(size(product.result) * split.share(number, product))
                made = single(product.result, columns, False)
                places[product.result] = arena.turned(arena.allocate(made), made, columns)
                pass_by = arena.reserve if operator_of(product.node).reserves else arena.pass_by
                pass_by(analysis.costs.scratch(product.node))
                readers.subtract(product.takes)
        done = {value for product in work.products for value in (product.result, *product.takes)}
        for value in [value for value in places if value in done and not readers[value]]:
            arena.free(places.pop(value))
    return arena.touched
