"""A model of a single node, run in ONNX Runtime."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy.typing as npt
import onnx_ir as ir
import onnxruntime as ort

Array = npt.NDArray[Any]


def node_alone(node: ir.Node, keeps: Callable[[ir.Value], bool], shapes: Sequence[Sequence[int]] = ()) -> ir.Graph:
    """A graph of the node alone. It is equal for all nodes that compute the same.

    Constants for which `keeps` is true are initializers. Other inputs are inputs of the graph, with these `shapes`.
    """
    remaining = iter(shapes)
    inputs: list[ir.Value | None] = []
    for number, value in enumerate(node.inputs):
        if value is None:
            inputs.append(None)
        elif keeps(value) and (tensor := value.const_value) is not None:
            # A tensor of its own: it gets the input's name, and holds its data.
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


def open_alone(content: bytes) -> ort.InferenceSession:
    """A session of a serialized model of one node, with one thread. Raises ONNX Runtime's errors."""
    options = ort.SessionOptions()
    options.log_severity_level, options.intra_op_num_threads = 4, 1
    return ort.InferenceSession(content, options, providers=["CPUExecutionProvider"], enable_fallback=0)


def run_alone(content: bytes, feeds: Mapping[str | None, Array]) -> list[Array]:
    """The results of a serialized model of one node, in one thread. Raises ONNX Runtime's errors."""
    arrays: list[Array] = open_alone(content).run(None, feeds)
    return arrays


def serialized(graph: ir.Graph) -> bytes:
    """A graph of one node as a serialized model."""
    content: bytes = ir.to_proto(ir.Model(graph, ir_version=10)).SerializeToString()
    return content
