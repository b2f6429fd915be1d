"""The graphs of row mode: the main rank's, in which an exchange replaces each product, and the slices of products.

An exchange takes its product's inputs and gives the columns of each rank, which a Concat joins. For engines that can't
send and receive, the main rank's graph is cut into segments at the exchanges. Between the segments the ranks multiply.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

import onnx_ir as ir

from splitc.compiler.analysis.blocks import Block
from splitc.compiler.analysis.stages import Stage
from splitc.compiler.frontend.graph import Graph
from splitc.compiler.frontend.origins import origin_of, stand_for
from splitc.compiler.lowering.open_shapes import open_shape
from splitc.compiler.lowering.rank_graph import rank_graph
from splitc.compiler.lowering.segments import Flow, Segment, cut_segments, group_joints
from splitc.compiler.lowering.stage_graph import stage_graph
from splitc.compiler.sharding.products import Product
from splitc.compiler.sharding.slices import SlicedProducts

EXCHANGE = "Exchange"
# The metadata key for the product that an exchange replaces.
_PRODUCT = "splitc.product"


def slice_name(product: Product, rank: int) -> str:
    """The name of a rank's columns of a product's result."""
    return f"{product.result.name}/rank{rank}"


def find_rounds(graph: Graph, stage: Stage, products: Sequence[Product]) -> tuple[tuple[Product, ...], ...]:
    """The products grouped into as few rounds as possible. The products of a round are independent."""
    by_node = {product.node: product for product in products}
    reads = {node: graph.reads[node] for node in stage.nodes} | {each.node: tuple(each.takes) for each in products}
    groups = group_joints(Flow(reads, frozenset(by_node), frozenset(stage.gives)))
    return tuple(tuple(by_node[node] for node in nodes) for nodes in groups if nodes)


def main_segments(split: SlicedProducts, stage: Stage) -> list[Segment]:
    """The main rank's segments of a stage. Their joints are exchanges."""
    return _cut(exchange_graph(split, stage))


def find_exchanges(graph: ir.Graph) -> dict[Product, ir.Node]:
    """The exchanges of a graph by the products that they replace."""
    return {node.meta[_PRODUCT]: node for node in graph if node.op_type == EXCHANGE}


def _cut(graph: ir.Graph) -> list[Segment]:
    return cut_segments(graph, {value.name or "" for value in graph.outputs}, EXCHANGE)


def exchange_graph(split: SlicedProducts, stage: Stage) -> ir.Graph:
    """The main rank's graph of a stage, with an exchange and a Concat of its columns in the place of each product."""
    result = stage_graph(split.graph, stage)
    for value in (value for node in result for value in node.outputs):  # segments declare types of inputs and outputs
        origin = origin_of(value)
        value.type = value.type or (origin.type if origin is not None else None)
    by_node = {product.node: product for product in split.products.values()}
    made = {origin_of(value): value for value in result.inputs}
    for node in list(result):
        replaced = origin_of(node)
        if replaced is not None and (product := by_node.get(replaced)) is not None:
            node = _exchange(result, node, [made[value] for value in product.takes], product, split.ranks(product))
        made.update({origin_of(value): value for value in node.outputs})
    return result


def _exchange(
    graph: ir.Graph, node: ir.Node, takes: Sequence[ir.Value], product: Product, ranks: Sequence[int]
) -> ir.Node:
    """Replace a product by an exchange and a Concat. Returns the Concat, which makes the result."""
    old = node.outputs[0]
    name = old.name or ""
    exchange = ir.node(EXCHANGE, takes, num_outputs=len(ranks), name=name)
    exchange.meta[_PRODUCT] = product
    for rank, part in zip(ranks, exchange.outputs, strict=True):
        part.name, part.type, part.shape = slice_name(product, rank), product.result.type, open_shape(product.result)
    joined = ir.node("Concat", exchange.outputs, {"axis": product.axis}, name=f"{name}/columns")
    whole = joined.outputs[0]
    graph.insert_before(node, [exchange, joined])
    old.replace_all_uses_with(whole, replace_graph_outputs=True)
    graph.remove(node, safe=True)
    whole.name, whole.type, whole.shape = name, old.type, old.shape or open_shape(old)
    stand_for(whole, product.result)
    return joined


def product_stage(graph: Graph, products: Collection[Product], blocks: Sequence[Block] = ()) -> Stage:
    """A stage of the products and of the nodes that fold their weights."""
    nodes: set[ir.Node] = set()
    takes = dict.fromkeys(value for product in products for value in product.takes)
    stack = [product.node for product in products]
    while stack:
        node = stack.pop()
        if node not in nodes:
            nodes.add(node)
            above = (value.producer() for value in graph.reads[node] if value not in takes)
            stack += [producer for producer in above if producer is not None]
    return Stage(
        blocks=tuple(blocks),
        nodes=tuple(sorted(nodes, key=graph.position.__getitem__)),
        feeds=(),
        receives=tuple(takes),
        sends=tuple(product.result for product in products),
        outputs=(),
        borrowed=(),
    )


def slice_graph(split: SlicedProducts, rank: int, products: Sequence[Product]) -> ir.Graph:
    """The graph of a rank's columns of the products of one round. The columns are named by `slice_name`."""
    graph = rank_graph(split.columns, product_stage(split.graph, products), rank)
    for value, product in zip(graph.outputs, products, strict=True):
        value.name = slice_name(product, rank)
        if value.shape is not None:
            value.shape = ir.Shape([*value.shape[:-1], split.width(rank, product)])
    return graph
