"""Row mode: which products make up a round, and the graph of a rank's columns of a round's results."""

from __future__ import annotations

from collections.abc import Collection, Sequence

import onnx_ir as ir

from splitc.compiler.analysis.blocks import Block
from splitc.compiler.analysis.stages import Stage
from splitc.compiler.frontend.graph import Graph
from splitc.compiler.frontend.walks import ancestors
from splitc.compiler.lowering.rank_graph import rank_graph
from splitc.compiler.lowering.segments import Flow, group_joints
from splitc.compiler.sharding.products import Product
from splitc.compiler.sharding.slices import SlicedProducts


def find_rounds(graph: Graph, stage: Stage, products: Sequence[Product]) -> tuple[tuple[Product, ...], ...]:
    """The products, grouped into the fewest rounds. No product of a round depends on another one of it."""
    by_node = {product.node: product for product in products}
    reads = {node: graph.reads[node] for node in stage.nodes}
    reads |= {product.node: tuple(product.takes) for product in products}
    groups = group_joints(Flow(reads, frozenset(by_node), frozenset(stage.gives)))
    return tuple(tuple(by_node[node] for node in nodes) for nodes in groups if nodes)


def product_stage(graph: Graph, products: Collection[Product], blocks: Sequence[Block] = ()) -> Stage:
    """A stage of the products and the nodes that compute their weights."""
    takes = dict.fromkeys(value for product in products for value in product.takes)
    nodes = ancestors(
        (product.node for product in products),
        lambda node: [value for value in graph.reads[node] if value not in takes],
    )
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
    """The graph that computes a rank's columns of a round's products. Each output has the product's `column_name`."""
    graph = rank_graph(split.columns, product_stage(split.graph, products), rank)
    for value, product in zip(graph.outputs, products, strict=True):
        value.name = split.column_name(rank, product)
        if value.shape is not None:
            value.shape = ir.Shape([*value.shape[:-1], split.width(rank, product)])
    return graph
