"""All graphs and nodes of a model's file."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain

import onnx


def all_graphs(proto: onnx.ModelProto, *, functions: bool) -> Iterator[onnx.GraphProto]:
    """The model's graph and the graphs inside its nodes; or those inside the nodes of its functions."""
    if not functions:
        yield proto.graph
    nodes = chain.from_iterable(function.node for function in proto.functions) if functions else proto.graph.node
    stack = list(chain.from_iterable(map(inner_graphs, nodes)))
    while stack:
        graph = stack.pop()
        yield graph
        stack += chain.from_iterable(map(inner_graphs, graph.node))


def all_nodes(proto: onnx.ModelProto) -> Iterator[onnx.NodeProto]:
    """All nodes of a model, including those of its functions and those inside other nodes."""
    yield from chain.from_iterable(function.node for function in proto.functions)
    for functions in (False, True):
        yield from chain.from_iterable(graph.node for graph in all_graphs(proto, functions=functions))


def inner_graphs(node: onnx.NodeProto) -> Iterator[onnx.GraphProto]:
    """The graphs that are attributes of a node."""
    for attribute in node.attribute:
        if attribute.HasField("g"):
            yield attribute.g
        yield from attribute.graphs


def lift_constants(graph: onnx.GraphProto) -> None:
    """Make weights of the graph's Constant nodes that hold a tensor, in place. Half of an exporter's nodes are such.

    onnx_ir can do it too, for any Constant, but takes longer than for all else of reading a model.
    """
    outputs = {value.name for value in graph.output}
    kept = onnx.GraphProto()
    for node in graph.node:
        names = [attribute.name for attribute in node.attribute]
        if node.op_type == "Constant" and not node.domain and names == ["value"] and node.output[0] not in outputs:
            tensor = graph.initializer.add()
            tensor.CopyFrom(node.attribute[0].t)
            tensor.name = node.output[0]
        else:
            kept.node.append(node)
    if len(kept.node) < len(graph.node):
        del graph.node[:]
        graph.node.extend(kept.node)
