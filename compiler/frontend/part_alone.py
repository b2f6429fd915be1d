"""A model of a part of a graph, run in ONNX Runtime."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy.typing as npt
import onnx_ir as ir

from splitc.compiler.frontend.node_alone import run_alone, serialized
from splitc.compiler.frontend.reads import view_of
from splitc.compiler.frontend.walks import ancestors, producers

Array = npt.NDArray[Any]


def nodes_between(known: Mapping[ir.Value, Array], wanted: Sequence[ir.Value]) -> set[ir.Node]:
    """The nodes that compute the `wanted` values from the `known` ones and from weights."""

    def above(node: ir.Node) -> list[ir.Value]:
        return [value for value in node.inputs if value is not None and value not in known]

    return ancestors(producers(value for value in wanted if value not in known), above)


def run_part(graph: ir.Graph, known: Mapping[ir.Value, Array], wanted: Sequence[ir.Value]) -> list[Array]:
    """Compute the `wanted` values from the `known` ones and from weights. Only the nodes between them are copied.

    Raises ONNX Runtime's errors, and ValueError if a value is needed but not known.
    """
    made = dict(known)
    if asked := [value for value in wanted if value not in known]:
        needed = nodes_between(known, asked)
        nodes = [node for node in graph if node in needed]
        read = dict.fromkeys(value for node in nodes for value in node.inputs if value is not None)
        inputs = [value for value in read if value in known]
        part = with_own_tensors(view_of(graph, inputs, asked, nodes))
        for copy, value in zip(part.inputs, inputs, strict=True):
            copy.shape = ir.Shape(known[value].shape)
        for value in (value for node in part for value in node.outputs):
            value.shape = None  # it may be of the planned sizes
        feeds = {value.name: known[value] for value in inputs}
        made.update(zip(asked, run_alone(serialized(part), feeds), strict=True))
    return [made[value] for value in wanted]


def with_own_tensors(graph: ir.Graph | ir.GraphView) -> ir.Graph:
    """A copy of a graph with copies of its weights: those of the model may lie in a file, or have other names."""
    copy = graph.clone()
    for value in copy.initializers.values():
        if (tensor := value.const_value) is not None:
            value.const_value = ir.Tensor(tensor.numpy(), tensor.dtype, name=value.name)
            value.shape, value.type = value.const_value.shape, ir.TensorType(tensor.dtype)
    return copy
