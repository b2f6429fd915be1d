"""Part of a graph as a model of its own, run in ONNX Runtime."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx_ir as ir

from splitc.compiler.frontend.node_alone import run_alone, serialized
from splitc.compiler.frontend.walks import ancestors, producers

Array = npt.NDArray[Any]


def nodes_between(known: Mapping[ir.Value, Array], wanted: Sequence[ir.Value]) -> set[ir.Node]:
    """The nodes that compute the `wanted` values from the `known` ones and from weights."""

    def above(node: ir.Node) -> list[ir.Value]:
        return [value for value in node.inputs if value is not None and value not in known]

    return ancestors(producers(value for value in wanted if value not in known), above)


def read_sizes(node: ir.Node, shape: Sequence[int]) -> Array:
    """What a node that reads sizes gives for a value of this shape."""
    if node.op_type == "Size":
        return np.array(np.prod(shape, dtype=np.int64))
    start, end = node.attributes.get_int("start", 0), node.attributes.get_int("end", None)
    return np.array(list(shape)[start:end], np.int64)


def run_part(graph: ir.Graph, known: Mapping[ir.Value, Array], wanted: Sequence[ir.Value]) -> list[Array]:
    """What the `wanted` values are, by the `known` ones and by weights. Only the nodes between them are copied.

    Raises what ONNX Runtime raises, ValueError for a value that is needed and not known.
    """
    made = dict(known)
    if asked := [value for value in wanted if value not in known]:
        part = _copied(graph, known, asked)
        taken = {value.name for value in part.inputs}
        feeds = {value.name: array for value, array in known.items() if value.name in taken}
        made.update(zip(asked, run_alone(serialized(part), feeds), strict=True))
    return [made[value] for value in wanted]


def _copied(graph: ir.Graph, known: Mapping[ir.Value, Array], wanted: Sequence[ir.Value]) -> ir.Graph:
    """A graph of copies of the nodes between known and wanted values."""
    copies: dict[ir.Value, ir.Value] = {}

    def copy_of(value: ir.Value) -> ir.Value:
        if value not in copies:
            copies[value] = _copy(value, known)
        return copies[value]

    nodes = [
        ir.Node(
            node.domain,
            node.op_type,
            [None if value is None else copy_of(value) for value in node.inputs],
            list(node.attributes.values()),
            outputs=[copy_of(value) for value in node.outputs],
            name=node.name,
        )
        for node in nodes_between(known, wanted)
    ]
    part = ir.Graph(
        [copy for value, copy in copies.items() if value in known],
        [copies[value] for value in wanted],
        nodes=nodes,
        initializers=[copy for copy in copies.values() if copy.const_value is not None],
        opset_imports=dict(graph.opset_imports),
        name="part",
    )
    part.sort()
    return part


def _copy(value: ir.Value, known: Mapping[ir.Value, Array]) -> ir.Value:
    """A value of the part: an input, a weight with its own numbers, or what a node makes."""
    if value in known:
        return ir.Value(name=value.name, shape=ir.Shape(known[value].shape), type=value.type)
    if value.producer() is not None:  # it may have a constant too, which is of the planned sizes
        return ir.Value(name=value.name, type=value.type)
    tensor = value.const_value
    if tensor is None:
        raise ValueError(f"'{value.name}' is needed, and not known")
    # A tensor of its own: that of the model may lie in a file, or have another name.
    return ir.Value(
        name=value.name,
        shape=ir.Shape(tensor.shape.numpy()),
        type=ir.TensorType(tensor.dtype),
        const_value=ir.Tensor(tensor.numpy(), tensor.dtype, name=value.name),
    )
