"""The graphs of a row split: the main rank's, in which an exchange stands for each product, and the slices of products.

An exchange takes what its product reads and gives the columns of each rank, which are put together behind it. The main
rank's graph is cut at its exchanges; between the pieces the ranks multiply.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence

import onnx_ir as ir

from splitc.compiler.analysis.blocks import Block
from splitc.compiler.analysis.stages import Stage
from splitc.compiler.frontend.graph import Graph
from splitc.compiler.frontend.origins import origin_of, stand_for
from splitc.compiler.lowering.rank_graph import rank_graph
from splitc.compiler.lowering.segments import Segment, cut_segments
from splitc.compiler.lowering.stage_graph import stage_graph
from splitc.compiler.sharding.products import Product
from splitc.compiler.sharding.slices import SlicedProducts

EXCHANGE = "Exchange"
# Where an exchange says what it stands for.
_PRODUCT = "splitc.product"


def slice_name(product: Product, rank: int) -> str:
    """The name of a rank's columns of what a product computes."""
    return f"{product.result.name}/rank{rank}"


def find_rounds(graph: Graph, stage: Stage, products: Sequence[Product]) -> tuple[tuple[Product, ...], ...]:
    """The products that can be multiplied at the same time, in as few rounds as can be."""
    main = _exchange_products(graph, stage, products, lambda _: [0])
    rounds = [tuple(node.meta[_PRODUCT] for node in segment.joints) for segment in _cut(main)]
    return tuple(each for each in rounds if each)


def main_segments(split: SlicedProducts, stage: Stage) -> list[Segment]:
    """What the main rank runs of a stage between the rounds; its joints are exchanges."""
    return _cut(_exchange_products(split.graph, stage, list(split.products.values()), split.ranks))


def _cut(graph: ir.Graph) -> list[Segment]:
    return cut_segments(graph, {value.name or "" for value in graph.outputs}, EXCHANGE)


def _exchange_products(
    graph: Graph, stage: Stage, products: Sequence[Product], ranks: Callable[[Product], Sequence[int]]
) -> ir.Graph:
    """The stage's graph with an exchange in the place of each product, and what puts its columns together."""
    result = stage_graph(graph, stage)
    for value in (value for node in result for value in node.outputs):  # segments declare what passes between them
        origin = origin_of(value)
        value.type = value.type or (origin.type if origin is not None else None)
    by_node = {product.node: product for product in products}
    made = {origin_of(value): value for value in result.inputs}
    for node in list(result):
        replaced = origin_of(node)
        if replaced is not None and (product := by_node.get(replaced)) is not None:
            node = _exchange(result, node, [made[value] for value in product.takes], product, ranks(product))
        made.update({origin_of(value): value for value in node.outputs})
    return result


def _exchange(
    graph: ir.Graph, node: ir.Node, takes: Sequence[ir.Value], product: Product, ranks: Sequence[int]
) -> ir.Node:
    """Put an exchange in the place of a product. Returns the node that then makes the result."""
    old = node.outputs[0]
    name = old.name or ""
    exchange = ir.node(EXCHANGE, takes, num_outputs=len(ranks), name=name)
    exchange.meta[_PRODUCT] = product
    for rank, part in zip(ranks, exchange.outputs, strict=True):
        part.name, part.type = slice_name(product, rank), product.result.type
    joined = ir.node("Concat", exchange.outputs, {"axis": product.axis}, name=f"{name}/columns")
    whole = joined.outputs[0]
    graph.insert_before(node, [exchange, joined])
    old.replace_all_uses_with(whole, replace_graph_outputs=True)
    graph.remove(node, safe=True)
    whole.name, whole.type, whole.shape = name, old.type, old.shape
    stand_for(whole, product.result)
    return joined


def product_stage(graph: Graph, products: Collection[Product], blocks: Sequence[Block] = ()) -> Stage:
    """The products, with what of their weights is computed from weights alone, as a stage of its own."""
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
    """What a rank computes of the products of one round: its own columns, under names of their own."""
    graph = rank_graph(split.columns, product_stage(split.graph, products), rank)
    for value, product in zip(graph.outputs, products, strict=True):
        value.name = slice_name(product, rank)
        if value.shape is not None:
            value.shape = ir.Shape([*value.shape[:-1], split.width(rank, product)])
    return graph
