"""The memory of ranks in row mode."""

from __future__ import annotations

from dataclasses import replace

from splitc.compiler.analysis.facts import Analysis
from splitc.compiler.analysis.memory import StageMemory, stage_memory
from splitc.compiler.analysis.stages import Stage
from splitc.compiler.execution.rounds import Round
from splitc.compiler.lowering.row_slices import product_stage
from splitc.compiler.sharding.held import held_shards
from splitc.compiler.sharding.slices import SlicedProducts

# About the number of nodes that send a product's input, receive its result, and join its columns.
PASSING = 3


def sliced_memory(analysis: Analysis, split: SlicedProducts, stage: Stage, number: int) -> StageMemory:
    """A rank's memory. The main rank holds everything except the other ranks' slices.

    Any other rank holds its slices, the inputs of its products, and its columns of their results.
    """
    products = list(split.products.values())
    own = split.of_rank(number, products)
    if number == 0:
        elsewhere = {product.node for product in products} - {product.node for product in own}
        held = held_shards(analysis.costs, split.columns, [node for node in stage.nodes if node not in elsewhere], 0)
        states = analysis.states
    else:
        # Exchanged values are computed inside the engine.
        stage, states, products = replace(product_stage(analysis.graph, own), receives=(), sends=()), (), own
        held = held_shards(analysis.costs, split.columns, stage.nodes, number)
    held = replace(held, size=analysis.costs.value_bytes, rounds=_rounds_of(split, number))
    memory = stage_memory(analysis.costs, states, stage, held)
    return replace(memory, nodes=memory.nodes + PASSING * len(products))


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
