"""The nodes that ONNX Runtime runs for a file's: those that it makes of several, and the order in which they run."""

from __future__ import annotations

from collections.abc import Collection, Container, Hashable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass

import onnx_ir as ir

from splitc.compiler.execution.convolutions import find_parts, resolve
from splitc.compiler.execution.engine_graph import EngineGraph
from splitc.compiler.execution.gelus import find_gelus
from splitc.compiler.execution.liveness import Nodes, Reads
from splitc.compiler.execution.normed_sums import find_normed_sums
from splitc.compiler.execution.order import depth_first, ends_gelu, positions_after_passes
from splitc.compiler.execution.products import biased_products, scaled_products
from splitc.compiler.execution.reshapes import without_own_sizes
from splitc.compiler.execution.rounds import Exchange, with_rounds
from splitc.compiler.execution.silus import find_silus
from splitc.compiler.frontend.node_key import node_key
from splitc.compiler.frontend.walks import producer_of
from splitc.compiler.operators.registry import operator_of


@dataclass(frozen=True)
class Fused:
    """The nodes in the order in which they run, and where each comes in ONNX Runtime's graph.

    `same` are values that others take the place of. `gelus` are what nodes that end a Gelu are of, `silus` the nodes
    that end an x sigmoid(x). `biased` are additions of a bias, with the product that they are part of. `scaled` are the
    results of scalings that are part of a product, with the value in whose place they are. `exchange` is the graph with
    what row mode's main rank sends and receives.
    """

    nodes: Nodes
    position: Mapping[ir.Node, int]
    same: Mapping[ir.Value, ir.Value]
    gelus: Mapping[ir.Node, ir.Value]
    silus: Container[ir.Node]
    biased: Mapping[ir.Node, ir.Node]
    scaled: Mapping[ir.Value, ir.Value]
    exchange: Exchange

    def ends(self, kept: Collection[ir.Value]) -> AbstractSet[ir.Value]:
        """What leaves the engine, by the values that are in the place of what is `kept`."""
        return {resolve(self.same, value) for value in kept}


def fuse(graph: EngineGraph) -> Fused:
    """What ONNX Runtime makes of a graph's nodes."""
    kept, alike, stays_alone = graph.kept, graph.alike, graph.stays_alone
    exchange = with_rounds(graph.nodes, graph.reads, graph.size, graph.rounds)
    merged, same = _merged(exchange.nodes)
    nodes = Nodes(merged, _replaced(_shapes_before(exchange.reads), same), kept)
    nodes, gelus = find_gelus(without_own_sizes(nodes))
    nodes, silus = find_silus(nodes)
    parts = find_parts(nodes, stays_alone)
    nodes = nodes.without({producer_of(value) for value in parts}, _replaced(nodes.reads, parts))
    nodes, norms = find_normed_sums(nodes, alike)
    biased = biased_products(nodes)
    scaled, products = scaled_products(nodes, lambda node: node in biased.values() or stays_alone(node))
    by_tanh = {node for node in gelus if node.op_type == "Mul" and not ends_gelu(node, {})}
    position = positions_after_passes(nodes, biased, norms, by_tanh, silus, products)
    nodes = Nodes(depth_first(nodes.order, nodes.reads, position), nodes.reads, kept)
    return Fused(nodes, position, {**same, **parts, **exchange.joined}, gelus, silus, biased, scaled, exchange)


def _replaced(reads: Reads, same: Mapping[ir.Value, ir.Value]) -> Reads:
    """What each node reads where others are the `same` as some values."""
    return lambda node: [resolve(same, value) for value in reads(node)]


def _shapes_before(reads: Reads) -> Reads:
    """What each node reads where a Shape is that of a Transpose's source, whose sizes are put in order then.

    It is HandleShape in core/optimizer/transpose_optimization/onnx_transpose_optimization.cc.
    """

    def read(node: ir.Node) -> list[ir.Value]:
        values = list(reads(node))
        while node.op_type == "Shape" and values and (maker := values[0].producer()) and maker.op_type == "Transpose":
            values = list(reads(maker))
        return values

    return read


def _merged(nodes: Sequence[ir.Node]) -> tuple[list[ir.Node], dict[ir.Value, ir.Value]]:
    """The nodes without those that compute what one before them does, and what is the same as another value then.

    ONNX Runtime merges them (core/optimizer/common_subexpression_elimination.cc).
    """
    first: dict[Hashable, ir.Node] = {}
    same = dict[ir.Value, ir.Value]()
    kept = []
    for node in nodes:
        inputs = tuple(value and same.get(value, value) for value in node.inputs)
        key = node_key(node)
        other = node if key is None else first.setdefault((key, inputs), node)
        if other is node or operator_of(node).random:
            kept.append(node)
        else:
            same.update(zip(node.outputs, other.outputs, strict=False))
    return kept, same
