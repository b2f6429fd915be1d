"""Row mode: the ranks' graphs, with sends and receives that tokens chain in the order of rounds.

In each round the main rank sends inputs of products, computes its own columns of their results while the other ranks
compute theirs, and receives these. All ranks have the rounds in one order, so no two wait for each other.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

import onnx_ir as ir

from splitc.compiler.analysis.blocks import Block
from splitc.compiler.analysis.stages import Stage
from splitc.compiler.graphs.origins import origin_of, restore_types, take_place
from splitc.compiler.graphs.walks import ancestors
from splitc.compiler.lowering.communication import ChainedGraph, take_name
from splitc.compiler.lowering.open_shapes import open_shape
from splitc.compiler.lowering.rank_graph import rank_graph
from splitc.compiler.lowering.segments import Flow, group_joints
from splitc.compiler.lowering.stage_graph import stage_graph
from splitc.compiler.normal_form.graph import Graph
from splitc.compiler.sharding.products import Product, SlicedProducts


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


def row_graph(sliced: SlicedProducts, stage: Stage, number: int) -> ir.Graph:
    """The graph of rank `number`; 0 is the main rank, and `stage` is its stage."""
    return _helper_graph(sliced, number) if number else _main_graph(sliced, stage)


def _main_graph(sliced: SlicedProducts, stage: Stage) -> ir.Graph:
    """The main rank's graph: the model, with each round's products replaced by sends, its own columns, and receives."""
    graph = stage_graph(sliced.graph, stage)
    restore_types(graph)
    outputs = [value for node in graph for value in node.outputs]
    nodes = {origin_of(node): node for node in graph}
    copies = {origin_of(value): value for value in (*graph.inputs, *outputs)}
    builder = _Builder(graph)
    works = [sliced.work(number) for number in range(sliced.columns.ranks)]
    for products, own, *others in zip(sliced.rounds, *works, strict=True):
        takes = {value: copies[value] for product in products for value in product.takes}
        for rank, work in enumerate(others, 1):
            takes.update({value: builder.send(takes[value], rank) for value in work.takes})
        columns = builder.multiply(sliced, 0, own.products, takes)
        for rank, work in enumerate(others, 1):
            for product in work.products:
                columns[product, rank] = builder.receive(sliced.column_name(rank, product), product.result, rank)
        for product in products:
            parts = [columns[product, rank] for rank in sliced.ranks(product)]
            copies[product.result] = _join_columns(graph, nodes[product.node], parts, product)
    return builder.finish()


def _join_columns(graph: ir.Graph, node: ir.Node, columns: Sequence[ir.Value], product: Product) -> ir.Value:
    """Replace a product by a Concat of all ranks' columns."""
    (old,) = node.outputs
    joined = ir.node("Concat", columns, {"axis": product.axis}, name=f"{old.name}/columns")
    whole = joined.outputs[0]
    graph.insert_before(node, joined)
    take_place(whole, old)
    whole.shape = whole.shape or open_shape(whole)
    graph.remove(node, safe=True)
    return whole


def _helper_graph(sliced: SlicedProducts, number: int) -> ir.Graph:
    """The graph of another rank: in each round it receives inputs of products, and sends its columns of the results."""
    whole = sliced.graph.graph
    builder = _Builder(ir.Graph([], [], nodes=[], opset_imports=whole.opset_imports, name=whole.name))
    takes: dict[ir.Value, ir.Value] = {}
    for work in sliced.work(number):
        takes.update({value: builder.receive(value.name or "", value, 0) for value in work.takes})
        for columns in builder.multiply(sliced, number, work.products, takes).values():
            builder.send(columns, 0)
    return builder.finish()


class _Builder(ChainedGraph):
    """A rank's graph in row mode under construction."""

    def __init__(self, graph: ir.Graph) -> None:
        super().__init__(graph)
        self._node_names = {node.name for node in graph}
        # The inserted copy of each node that computes from weights alone.
        self._folded: dict[ir.Node, ir.Node] = {}

    def multiply(
        self, sliced: SlicedProducts, rank: int, products: Sequence[Product], takes: Mapping[ir.Value, ir.Value]
    ) -> dict[tuple[Product, int], ir.Value]:
        """Compute the rank's columns of a round's products. Later transfers wait for all of them."""
        if not products:
            return {}
        part = slice_graph(sliced, rank, products)
        columns = self._insert(part, {value.name or "": copy for value, copy in takes.items()}, sliced.graph.constant)
        self.run_before(columns)
        return dict(zip(((product, rank) for product in products), columns, strict=True))

    def _insert(self, part: ir.Graph, inputs: Mapping[str, ir.Value], constant: Collection[ir.Node]) -> list[ir.Value]:
        """Move the nodes and initializers of another graph into this one. Returns the other graph's outputs.

        Nodes that compute from weights alone (`constant`) are inserted once: engines fold them.
        """
        outputs, nodes = list(part.outputs), list(part)
        part.outputs.clear()
        for value in part.inputs:
            value.replace_all_uses_with(inputs[value.name or ""])
        for weight in list(part.initializers.values()):
            known = self._graph.initializers.get(weight.name or "")
            part.initializers.pop(weight.name or "")
            if known is not None and known.const_value is weight.const_value:
                weight.replace_all_uses_with(known)
            else:
                weight.name = take_name(weight.name, self._names)
                self._graph.register_initializer(weight)
        part.remove(nodes)
        for node in nodes:
            origin = origin_of(node)
            first = node if origin is None or origin not in constant else self._folded.setdefault(origin, node)
            if first is not node:
                ir.convenience.replace_all_uses_with(node.outputs, first.outputs)
                for number in range(len(node.inputs)):
                    node.replace_input_with(number, None)
                continue
            node.name = take_name(node.name, self._node_names)
            for value in node.outputs:
                value.name = take_name(value.name, self._names)
            self._graph.append(node)
        return outputs
