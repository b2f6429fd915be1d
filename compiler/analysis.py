"""All that is found out about a model before anything is decided."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from splitc.compiler.blocks import Partition, find_blocks
from splitc.compiler.costs import Costs
from splitc.compiler.graph import Graph, ModelError, describe_node, open_graph, subgraphs
from splitc.compiler.shapes import (
    AskedShapes,
    Shape,
    bind_shapes,
    check_order,
    infer_shapes,
    input_shapes,
    read_symbols,
    reconcile,
)
from splitc.compiler.states import find_states, growing_symbols
from splitc.runtime.manifest import State


@dataclass(frozen=True)
class Analysis:
    """A model's graph, its input shapes as bound, its costs with them, its states and its blocks.

    `shapes` are the largest that it is planned for; `smallest` and `typical` are others that engines are to take.
    """

    graph: Graph
    shapes: Mapping[str, Shape]
    smallest: Mapping[str, Shape]
    typical: Mapping[str, Shape]
    costs: Costs
    states: tuple[State, ...]
    partition: Partition


# A control flow node that holds more than this share of the weights makes a split pointless.
INDIVISIBLE = 0.9


def check_divisible(analysis: Analysis) -> None:
    """Raise ModelError when the model is inside one If, Loop or Scan, which can't be cut, as merged decoders are."""
    costs, partition = analysis.costs, analysis.partition
    whole = costs.weight_bytes(analysis.graph.nodes)
    for node in (node for block in partition.blocks for node in block.nodes if any(subgraphs(node))):
        inside = costs.weight_bytes([node, *partition.upstream[node]])
        if inside > INDIVISIBLE * whole:
            raise ModelError(
                f"{describe_node(node)}, of kind {node.op_type}, holds {inside / whole:.0%} of the model's weights, "
                "and splitc does not cut inside control flow: export the model without it (a merged decoder as one "
                "model with past and one without), or name one device"
            )


def analyze(path: Path, asked: AskedShapes, wanted_blocks: int) -> Analysis:
    """Open the model and find its blocks, at least `wanted_blocks` where it can be cut that finely.

    Raises ModelError for a model that can't be used, MisuseError for shapes that are not its own.
    """
    graph = open_graph(path)
    read_symbols(graph.model)
    infer_shapes(graph.model)
    states = find_states(graph)
    growing = growing_symbols(graph, states)
    smallest, typical, largest = (input_shapes(graph.model, given, growing) for given in asked.three())
    check_order(smallest, typical, largest)
    costs = Costs(graph, bind_shapes(graph.model, largest))
    reconcile(graph.model, costs.bound)
    blocks = find_blocks(graph, costs, wanted_blocks)
    return Analysis(graph, largest, smallest, typical, costs, tuple(states), blocks)
