"""Runs a single node, or a part of a graph, in ONNX Runtime."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import onnx_ir as ir
import onnxruntime as ort

from splitc.compiler.graphs.reads import view_of
from splitc.compiler.graphs.walks import ancestors, producers
from splitc.compiler.nodes import inputs_of, known_tensor
from splitc.runtime.arrays.array import Array
from splitc.runtime.arrays.ort_values import run_on_arrays
from splitc.runtime.engines.onnx_session import open_in_memory


def node_alone(node: ir.Node, keeps: Callable[[ir.Value], bool], shapes: Sequence[Sequence[int]] = ()) -> ir.Graph:
    """A graph of one node. Nodes that compute the same have equal graphs.

    Constants for which `keeps` is true are initializers. The other inputs are inputs of the graph, with these `shapes`.
    """
    remaining = iter(shapes)
    inputs: list[ir.Value | None] = []
    for number, value in enumerate(node.inputs):
        if value is None:
            inputs.append(None)
        elif keeps(value) and (tensor := value.const_value) is not None:
            # A copy in memory, since it gets the input's name.
            own = ir.Tensor(tensor.numpy(), tensor.dtype)
            kind = ir.TensorType(own.dtype)  # a value that was just folded has none yet
            inputs.append(ir.Value(name=f"input{number}", shape=own.shape, type=kind, const_value=own))
        else:
            inputs.append(ir.Value(name=f"input{number}", shape=ir.Shape(next(remaining)), type=value.type))
    copy = ir.Node(node.domain, node.op_type, inputs, list(node.attributes.values()), num_outputs=len(node.outputs))
    for number, value in enumerate(copy.outputs):
        value.name = f"output{number}" if node.outputs[number].name else ""
    values = [value for value in inputs if value is not None]
    return ir.Graph(
        [value for value in values if value.const_value is None],
        [value for value in copy.outputs if value.name],
        nodes=[copy],
        initializers=[value for value in values if value.const_value is not None],
        opset_imports=dict(node.graph.opset_imports) if node.graph is not None else {"": 21, node.domain: 1},
        name="alone",
    )


def open_alone(graph: ir.Graph) -> ort.InferenceSession:
    """A session of a small graph, with one thread. Raises ONNX Runtime's errors."""
    options = ort.SessionOptions()
    options.log_severity_level, options.intra_op_num_threads = 4, 1
    content = ir.to_proto(ir.Model(graph, ir_version=10)).SerializeToString()
    return open_in_memory(content, options)


def run_alone(graph: ir.Graph, feeds: Mapping[str | None, Array]) -> list[Array]:
    """The results of a small graph, in one thread. Raises ONNX Runtime's errors."""
    return run_on_arrays(open_alone(graph), None, {name or "": array for name, array in feeds.items()})


def nodes_between(known: Mapping[ir.Value, Array], wanted: Sequence[ir.Value]) -> set[ir.Node]:
    """The nodes that compute the `wanted` values from the `known` ones and from weights."""

    def above(node: ir.Node) -> list[ir.Value]:
        return [value for value in inputs_of(node) if value not in known]

    return ancestors(producers(value for value in wanted if value not in known), above)


def run_part(graph: ir.Graph, known: Mapping[ir.Value, Array], wanted: Sequence[ir.Value]) -> list[Array]:
    """Compute the `wanted` values from the `known` ones and from weights. Only the nodes between them are copied.

    Raises ONNX Runtime's errors, and ValueError if a value is needed that is not known, or an optional input.
    """
    made = dict(known)
    if asked := [value for value in wanted if value not in known]:
        needed = nodes_between(known, asked)
        nodes = [node for node in graph if node in needed]
        read = dict.fromkeys(value for node in nodes for value in inputs_of(node))
        inputs = [value for value in read if value in known]
        if any(value.is_initializer() and known_tensor(value) is None for value in read if value not in known):
            raise ValueError("requests may override a value that is needed")
        part = with_own_tensors(view_of(graph, inputs, asked, nodes))
        for copy, value in zip(part.inputs, inputs, strict=True):
            copy.shape = ir.Shape(known[value].shape)
            copy.type = copy.type or ir.TensorType(ir.DataType.from_numpy(known[value].dtype))  # a body need not say it
        for value in (value for node in part for value in node.outputs):
            value.shape = None  # it may be of the planned sizes
        feeds = {value.name: known[value] for value in inputs}
        made.update(zip(asked, run_alone(part, feeds), strict=True))
    return [made[value] for value in wanted]


def with_own_tensors(graph: ir.Graph | ir.GraphView) -> ir.Graph:
    """A copy of a graph with its weights copied into memory: the model's may lie in a file, or have other names."""
    copy = graph.clone()
    for value in copy.initializers.values():
        if (tensor := value.const_value) is not None:
            value.const_value = ir.Tensor(tensor.numpy(), tensor.dtype, name=value.name)
            value.shape, value.type = value.const_value.shape, ir.TensorType(tensor.dtype)
    return copy
