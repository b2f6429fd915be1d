"""Finds rematerializable nodes: masks, rotary tables, shapes, and others that are cheap to compute from inputs.

Each stage that needs such a value computes it itself, so that the value does not cross a cut.
"""

from __future__ import annotations

from collections.abc import Sequence

import onnx_ir as ir

from splitc.compiler.analysis.costs import Costs
from splitc.compiler.graphs.reads import is_random
from splitc.compiler.graphs.walks import producers
from splitc.compiler.normal_form.graph import Graph
from splitc.compiler.states.own_sizes import has_own_size

# A node is rematerializable if it and its ancestors have at most this share of the model's operations and weight bytes,
# and at most this many bytes of weights: then stages repeat little. With any share from 0.003 to 0.03, the blocks of 56
# of 57 models are the same. The limit in bytes only matters in models of more than 6 GiB, and is a choice: weights that
# several stages hold take at most 64 MiB each.
REMATERIALIZABLE_SHARE = 0.01
REMATERIALIZABLE_WEIGHT_BYTES = 64 << 20
# A node with more bytes of weights than this is not rematerializable if all its readers lie within this share of the
# main path: it belongs to one block. Values that several blocks share are read over a longer distance. With any share
# from 0.125 to 0.5, the blocks of all 57 models are the same.
NEGLIGIBLE_WEIGHT_BYTES = 1024
LOCAL_SHARE = 0.25


def find_rematerializable(graph: Graph, costs: Costs, shapes: frozenset[ir.Node]) -> frozenset[ir.Node]:
    """The nodes that are cheap together with all their ancestors, so that each stage may compute them itself.

    Nodes that depend on weights alone (a transposed or dequantized weight) are always rematerializable: engines fold
    them. So are the Shape nodes in `shapes`: a stage without their input reads the sizes off another value.
    """
    most_flops = REMATERIALIZABLE_SHARE * sum(costs.flops(node) for node in graph.nodes)
    most_bytes = min(REMATERIALIZABLE_SHARE * costs.weight_bytes(graph.nodes), REMATERIALIZABLE_WEIGHT_BYTES)
    # By rematerializable node: the nodes that have to run for it, including itself; none if it is folded.
    cones: dict[ir.Node, frozenset[ir.Node]] = {}
    weighty: set[ir.Node] = set()
    for node in graph.nodes:
        if node in shapes or node in graph.constant:
            cones[node] = frozenset()
            continue
        makers = list(producers(graph.reads[node]))
        if not all(maker in cones for maker in makers) or is_random(node):
            continue
        if costs.is_product(node) and graph.weights(node):
            continue  # a product with weights is never rematerializable, even if it is a small share of a deep model
        cone = frozenset((node,)).union(*(cones[maker] for maker in makers))
        weights = costs.weight_bytes(cone)
        if sum(map(costs.flops, cone)) <= most_flops and weights <= most_bytes:
            cones[node] = cone
            if weights > NEGLIGIBLE_WEIGHT_BYTES:
                weighty.add(node)
    return frozenset(cones) - (weighty & _read_in_one_place(graph, frozenset(cones)))


def _read_in_one_place(graph: Graph, cheap: frozenset[ir.Node]) -> frozenset[ir.Node]:
    """The cheap nodes whose readers lie close together among the other nodes (see LOCAL_SHARE).

    Otherwise a small embedding would be rematerializable, and with it the first values of the residual stream.
    """
    position = {node: index for index, node in enumerate(node for node in graph.nodes if node not in cheap)}
    first: dict[ir.Node, int] = {}
    last: dict[ir.Node, int] = {}
    for node in reversed(graph.nodes):
        at = position.get(node)
        earliest = first.get(node, len(position)) if at is None else at
        latest = last.get(node, -1) if at is None else at
        for maker in producers(graph.reads[node]):
            if maker in cheap:
                first[maker] = min(first.get(maker, earliest), earliest)
                last[maker] = max(last.get(maker, latest), latest)
    return frozenset(
        node for node in cheap if node in first and 0 <= last[node] - first[node] < LOCAL_SHARE * len(position)
    )


def find_upstream(
    graph: Graph, rematerializable: frozenset[ir.Node], shapes: frozenset[ir.Node], main_path: Sequence[ir.Node]
) -> dict[ir.Node, frozenset[ir.Node]]:
    """For each node of the main path, the rematerializable nodes that it depends on."""
    cones: dict[ir.Node, frozenset[ir.Node]] = {}
    for node in graph.nodes:
        makers = (maker for maker in producers(graph.reads[node]) if maker in rematerializable)
        above = frozenset[ir.Node]().union(*(cones[maker] for maker in makers))
        cones[node] = above if node not in rematerializable else frozenset([node]) if node in shapes else above | {node}
    return {node: cones[node] for node in main_path}


def find_known_shapes(graph: Graph) -> frozenset[ir.Node]:
    """The Shape nodes whose sizes are all constants or sizes of the model's inputs."""
    sizes = (
        size
        for value in graph.graph.inputs
        for axis, size in enumerate(value.shape or ())
        if not has_own_size(value, axis)
    )
    known = {size.value for size in sizes if isinstance(size, ir.SymbolicDim) and size.value}

    def is_known(value: ir.Value | None) -> bool:
        shape = value.shape if value is not None else None
        return shape is not None and all(isinstance(size, int) or size.value in known for size in shape)

    return frozenset(node for node in graph.nodes if node.op_type == "Shape" and is_known(node.inputs[0]))
