"""The nodes that ONNX Runtime runs after fusing those of a file, and their order."""

from __future__ import annotations

from collections.abc import Collection, Container, Hashable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, replace

import onnx_ir as ir

from splitc.compiler.execution.convolutions import find_parts, resolve
from splitc.compiler.execution.exchange import EngineGraph, Exchange, with_exchange
from splitc.compiler.execution.liveness import Nodes, Reads
from splitc.compiler.execution.order import depth_first, ends_gelu, positions_after_passes
from splitc.compiler.execution.patterns import (
    biased_products,
    find_gelus,
    find_normed_sums,
    find_silus,
    inline,
    scaled_products,
)
from splitc.compiler.execution.quantized import find_quantized
from splitc.compiler.execution.removed import find_turned_back, without_own_sizes
from splitc.compiler.graphs.node_key import node_key
from splitc.compiler.graphs.walks import producer_of
from splitc.compiler.operators.registry import operator_of


@dataclass(frozen=True)
class Fused:
    """The nodes in execution order, and `position`, each one's place in ONNX Runtime's graph.

    - `same`: values that are replaced by others.
    - `gelus`: the last nodes of fused Gelus, with their inputs.
    - `silus`: the last nodes of fused x sigmoid(x).
    - `biased`: additions of a bias, with the product they are fused into.
    - `scaled`: results of scalings that are fused into a product, with the value that replaces them.
    - `exchange`: the graph with the rank's communication.
    - `bytes`: the sizes of values that are not in the file.
    - `integers`: nodes that compute in integers, with the node of the file that each replaces.
    """

    nodes: Nodes
    position: Mapping[ir.Node, int]
    same: Mapping[ir.Value, ir.Value]
    gelus: Mapping[ir.Node, ir.Value]
    silus: Container[ir.Node]
    biased: Mapping[ir.Node, ir.Node]
    scaled: Mapping[ir.Value, ir.Value]
    exchange: Exchange
    bytes: Mapping[ir.Value, int]
    integers: Mapping[ir.Node, ir.Node]

    def ends(self, kept: Collection[ir.Value]) -> AbstractSet[ir.Value]:
        """The values that leave the engine: `kept`, or what replaces them."""
        return {resolve(self.same, value) for value in kept}


def fuse(graph: EngineGraph, on_host: bool = True) -> Fused:
    """The nodes that ONNX Runtime makes of a graph's. It computes in integers only `on_host`."""
    kept, alike, exchange = graph.kept, graph.alike, with_exchange(graph)
    inlined = inline(exchange.nodes, exchange.reads, graph.size)
    merged, same = _merged(inlined.nodes)
    nodes = without_own_sizes(Nodes(merged, _replaced(_shapes_before(inlined.reads), same), kept))
    nodes, integers = find_quantized(nodes) if on_host else (nodes, {})
    turned = find_turned_back(nodes, graph.size)
    nodes = _without(nodes, turned)
    nodes, gelus = find_gelus(nodes, exchange.came)
    nodes, silus = find_silus(nodes)
    parts = find_parts(nodes)
    nodes = _without(nodes, parts)
    nodes, norms = find_normed_sums(nodes, alike)
    biased = biased_products(nodes)
    scaled, products = scaled_products(nodes, set(biased.values()))
    by_tanh = {node for node in gelus if node.op_type == "Mul" and not ends_gelu(node, {})}
    position = positions_after_passes(nodes, biased, integers, norms, by_tanh, silus, products)
    nodes = Nodes(depth_first(nodes.order, nodes.reads, position), nodes.reads, kept)
    same, own = {**graph.same, **same, **turned, **parts, **exchange.came}, {**exchange.bytes, **inlined.bytes}
    return Fused(nodes, position, same, gelus, silus, biased, scaled, exchange, own, integers)


def _without(nodes: Nodes, same: Mapping[ir.Value, ir.Value]) -> Nodes:
    """The nodes without those whose results are replaced."""
    return replace(nodes.without(set(map(producer_of, same))), reads=_replaced(nodes.reads, same)) if same else nodes


def _replaced(reads: Reads, same: Mapping[ir.Value, ir.Value]) -> Reads:
    """The values that each node reads, after replacement."""
    return lambda node: [resolve(same, value) for value in reads(node)]


def _shapes_before(reads: Reads) -> Reads:
    """What each node reads once a Shape of a Transpose reads the Transpose's input, and permutes the sizes instead.

    See HandleShape in core/optimizer/transpose_optimization/onnx_transpose_optimization.cc.
    """

    def read(node: ir.Node) -> list[ir.Value]:
        values = list(reads(node))
        while node.op_type == "Shape" and values and (maker := values[0].producer()) and maker.op_type == "Transpose":
            values = list(reads(maker))
        return values

    return read


def _merged(nodes: Sequence[ir.Node]) -> tuple[list[ir.Node], dict[ir.Value, ir.Value]]:
    """The nodes without common subexpressions, and the values that are replaced.

    ONNX Runtime eliminates them (core/optimizer/common_subexpression_elimination.cc).
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
