"""Collects all graphs and nodes of a model's file, as protobufs."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import chain

import numpy as np
import onnx


@dataclass(frozen=True)
class Contents:
    """The contents of a model's file.

    - `graphs`: its graph and the subgraphs of its nodes.
    - `in_functions`: the subgraphs of its functions' nodes.
    - `nodes`: the nodes of all these graphs, and of the functions.
    """

    graphs: tuple[onnx.GraphProto, ...]
    in_functions: tuple[onnx.GraphProto, ...]
    nodes: tuple[onnx.NodeProto, ...]


def contents_of(proto: onnx.ModelProto) -> Contents:
    """All graphs and nodes of a model, collected once: that takes longer than most uses of them."""
    loose = tuple(chain.from_iterable(function.node for function in proto.functions))
    graphs = (proto.graph, *graphs_inside(proto.graph.node))
    in_functions = tuple(graphs_inside(loose))
    inside = chain.from_iterable(graph.node for graph in (*graphs, *in_functions))
    return Contents(graphs, in_functions, (*loose, *inside))


def graphs_inside(nodes: Iterable[onnx.NodeProto]) -> Iterator[onnx.GraphProto]:
    """The graphs inside nodes, and those inside them."""
    stack = list(chain.from_iterable(map(inner_graphs, nodes)))
    while stack:
        graph = stack.pop()
        yield graph
        stack += chain.from_iterable(map(inner_graphs, graph.node))


def inner_graphs(node: onnx.NodeProto) -> Iterator[onnx.GraphProto]:
    """The graphs that are attributes of a node."""
    for attribute in node.attribute:
        if attribute.HasField("g"):
            yield attribute.g
        yield from attribute.graphs


def lift_constants(graph: onnx.GraphProto) -> None:
    """Turn the graph's Constant nodes that hold a tensor into initializers, in place.

    Half of an export's nodes are such Constants. onnx_ir's pass lifts all Constants, but takes longer than the rest of
    reading a model.
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


def make_dense(contents: Contents) -> None:
    """Turn sparse weights and constants into plain ones, in place: ONNX Runtime does so when it loads a model.

    Raises ValueError for elements outside of the tensor, and for tensors that are too large for ONNX's files.
    """
    for graph in (*contents.graphs, *contents.in_functions):
        graph.initializer.extend(map(_dense, graph.sparse_initializer))
        del graph.sparse_initializer[:]
    for attribute in chain.from_iterable(node.attribute for node in contents.nodes if node.op_type == "Constant"):
        if attribute.name == "sparse_value":
            made = onnx.helper.make_attribute("value", _dense(attribute.sparse_tensor))
            attribute.CopyFrom(made)


def _dense(sparse: onnx.SparseTensorProto) -> onnx.TensorProto:
    """The tensor with all elements. The places of those that are not 0 are indices of each axis, or of all in a row."""
    elements, places = map(onnx.numpy_helper.to_array, (sparse.values, sparse.indices))
    if math.prod(sparse.dims) * elements.itemsize >= 2 << 30:
        raise ValueError(f"the sparse tensor '{sparse.values.name}' takes 2 GiB or more as a plain one")
    dense = np.zeros(tuple(sparse.dims), elements.dtype)
    flat = places if places.ndim == 1 else np.ravel_multi_index(tuple(places.T), dense.shape)
    if flat.size and not 0 <= flat.min() <= flat.max() < dense.size:
        raise ValueError(f"the sparse tensor '{sparse.values.name}' has elements outside of its shape")
    dense.reshape(-1)[flat] = elements
    return onnx.numpy_helper.from_array(dense, sparse.values.name)
