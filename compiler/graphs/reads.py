"""What nodes read: inputs, values that subgraphs capture, sizes. And which nodes have subgraphs, or are random."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence
from typing import TypeVar

import numpy as np
import onnx_ir as ir

from splitc.compiler.nodes import inputs_of
from splitc.compiler.operators.registry import draws
from splitc.runtime.arrays.array import Array

T = TypeVar("T")


def subgraphs(node: ir.Node) -> Iterator[ir.Graph]:
    """The graphs that are a node's attributes: the branches of an If, the body of a Loop or Scan."""
    for attribute in node.attributes.data.values():  # the mapping's own views take five times as long
        if attribute.type == ir.AttributeType.GRAPH:
            yield attribute.as_graph()
        elif attribute.type == ir.AttributeType.GRAPHS:
            yield from attribute.as_graphs()


def holds_graphs(node: ir.Node) -> bool:
    """Whether a node has subgraphs, also such without nodes, which are false as a truth value."""
    return bool(node.attributes) and next(subgraphs(node), None) is not None


def has_subgraphs(graph: ir.Graph) -> bool:
    """Whether any of the graph's nodes has a subgraph."""
    return any(map(holds_graphs, graph))


def all_nodes(graph: ir.Graph) -> Iterator[ir.Node]:
    """The nodes of a graph and of its subgraphs. `ir.Graph.all_nodes` gives the same, in four times the time."""
    for node in graph:
        yield node
        if node.attributes:
            for inner in subgraphs(node):
                yield from all_nodes(inner)


def is_random(node: ir.Node) -> bool:
    """Whether a node, or one in its subgraphs, draws random numbers."""
    return draws(node) or any(draws(inner) for graph in subgraphs(node) for inner in all_nodes(graph))


def node_reads(node: ir.Node) -> Iterator[ir.Value]:
    """The values of the main graph that one of its nodes reads, itself or in subgraphs: once each, in a fixed order.

    onnx_ir's analysis of implicit usage returns sets, whose order would vary in files.
    """
    graphs = list(subgraphs(node)) if node.attributes else []
    if not graphs:
        return iter(dict.fromkeys(inputs_of(node)))
    inner = (n for graph in graphs for n in ir.traversal.RecursiveGraphIterator(graph))
    named = (value for graph in graphs for value in graph.outputs)
    read = itertools.chain(node.inputs, *(n.inputs for n in inner), named)
    return iter(dict.fromkeys(value for value in read if value is not None and value.graph is node.graph))


def given_sizes(node: ir.Node, sizes: Iterable[T]) -> list[T]:
    """The sizes, or axes, that a Shape returns of all those of its input, by its `start` and `end`."""
    return list(sizes)[node.attributes.get_int("start", 0) : node.attributes.get_int("end", None)]


def read_sizes(node: ir.Node, shape: Sequence[int]) -> Array:
    """The result of a node that reads sizes, for a value of this shape."""
    if node.op_type == "Size":
        return np.array(np.prod(shape, dtype=np.int64))
    return np.array(given_sizes(node, shape), np.int64)


def view_of(
    graph: ir.Graph, inputs: Sequence[ir.Value], outputs: Sequence[ir.Value], nodes: Sequence[ir.Node]
) -> ir.GraphView:
    """A graph of some of a graph's nodes, with these inputs and outputs, and the weights that the nodes read."""
    read = dict.fromkeys(value for node in nodes for value in node_reads(node))
    return ir.GraphView(
        inputs,
        outputs,
        nodes=nodes,
        initializers=tuple(value for value in read if value.is_initializer()),
        opset_imports=dict(graph.opset_imports),  # a copy, since passes for one device may add imports
        name=graph.name,
        doc_string=graph.doc_string,
        metadata_props=graph.metadata_props,
    )
