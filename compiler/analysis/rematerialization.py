"""Free nodes: what is cheap to compute from the model's inputs and from constants: masks, rotary tables, shapes.

Any stage that needs a free value computes it again, so that it does not cross a cut.
"""

from __future__ import annotations

from collections.abc import Sequence

import onnx_ir as ir

from splitc.compiler.analysis.costs import Costs
from splitc.compiler.frontend.graph import Graph
from splitc.compiler.operators.registry import operator_of

# A value is free when all that it is computed from costs at most this share of the model, and no more than this
# many bytes of weights: what K stages repeat then stays small beside what they are.
FREE_SHARE = 0.01
FREE_WEIGHT_BYTES = 64 << 20
# What reads more bytes of weights than this, and is read itself within this share of all that is not free, belongs
# there: blocks are smaller, as a rule, and what several blocks share is read over a longer stretch.
WEIGHT_FREE = 1024
LOCAL_SHARE = 0.25


def find_free(graph: Graph, costs: Costs, shapes: frozenset[ir.Node]) -> frozenset[ir.Node]:
    """The nodes whose whole ancestry is cheap, so that each stage may compute them again (see FREE_SHARE).

    What depends on weights alone (a transposed or dequantized weight) is free whatever it costs: the engine folds it.
    So are the Shape nodes `shapes`: a stage that lacks the value finds its sizes elsewhere.
    """
    most_flops = FREE_SHARE * sum(costs.flops(node) for node in graph.nodes)
    most_bytes = min(FREE_SHARE * costs.weight_bytes(graph.nodes), FREE_WEIGHT_BYTES)
    # For each free node, those that must be computed for it. Empty where nothing is computed at run time.
    cones: dict[ir.Node, frozenset[ir.Node]] = {}
    weighty: set[ir.Node] = set()
    for node in graph.nodes:
        if node in shapes or node in graph.constant:
            cones[node] = frozenset()
            continue
        producers = [producer for value in graph.reads[node] if (producer := value.producer()) is not None]
        if operator_of(node).random or not all(producer in cones for producer in producers):
            continue
        if costs.is_product(node) and graph.weights(node):
            continue  # that is what a model is made of, however little it is of a deep one
        cone = frozenset((node,)).union(*(cones[producer] for producer in producers))
        weights = costs.weight_bytes(cone)
        if sum(map(costs.flops, cone)) <= most_flops and weights <= most_bytes:
            cones[node] = cone
            if weights > WEIGHT_FREE:
                weighty.add(node)
    return frozenset(cones) - (weighty & _read_in_one_place(graph, frozenset(cones)))


def _read_in_one_place(graph: Graph, free: frozenset[ir.Node]) -> frozenset[ir.Node]:
    """The free nodes whose results are read within a small stretch of the rest (see LOCAL_SHARE).

    Where these hold weights the stretch owns them: else a small embedding would be free, and the first residual stream.
    """
    position = {node: index for index, node in enumerate(node for node in graph.nodes if node not in free)}
    first: dict[ir.Node, int] = {}
    last: dict[ir.Node, int] = {}
    for node in reversed(graph.nodes):
        at = position.get(node)
        earliest = first.get(node, len(position)) if at is None else at
        latest = last.get(node, -1) if at is None else at
        for value in graph.reads[node]:
            producer = value.producer()
            if producer is not None and producer in free:
                first[producer] = min(first.get(producer, earliest), earliest)
                last[producer] = max(last.get(producer, latest), latest)
    return frozenset(
        node for node in free if node in first and 0 <= last[node] - first[node] < LOCAL_SHARE * len(position)
    )


def find_upstream(
    graph: Graph, free: frozenset[ir.Node], shapes: frozenset[ir.Node], spine: Sequence[ir.Node]
) -> dict[ir.Node, frozenset[ir.Node]]:
    """For each node of the spine the free nodes above it."""
    cones: dict[ir.Node, frozenset[ir.Node]] = {}
    for node in graph.nodes:
        producers = (value.producer() for value in graph.reads[node])
        above = frozenset[ir.Node]().union(*(cones[p] for p in producers if p in free))
        cones[node] = above if node not in free else frozenset([node]) if node in shapes else above | {node}
    return {node: cones[node] for node in spine}


def find_shapes(graph: Graph) -> frozenset[ir.Node]:
    """The Shape nodes all of whose sizes are numbers or sizes of the model's inputs."""
    inputs = (size for value in graph.graph.inputs for size in value.shape or ())
    known = {size.value for size in inputs if isinstance(size, ir.SymbolicDim) and size.value}

    def is_known(value: ir.Value | None) -> bool:
        shape = value.shape if value is not None else None
        return shape is not None and all(isinstance(size, int) or size.value in known for size in shape)

    return frozenset(node for node in graph.nodes if node.op_type == "Shape" and is_known(node.inputs[0]))
