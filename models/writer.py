"""Write an ONNX graph node by node, named by nested scopes as exporters name them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx_ir as ir

Size = int | str
OPSET = 17


class Writer:
    """A graph under construction. Values are onnx_ir's; inference sets shapes and types of nodes' outputs."""

    def __init__(self, opset: int = OPSET) -> None:
        self._opsets = {"": opset}
        self._inputs: list[ir.Value] = []
        self._outputs: list[ir.Value] = []
        self._nodes: list[ir.Node] = []
        self._weights: dict[str, ir.Value] = {}
        self._scopes: list[str] = []
        self._names: Counter[str] = Counter()

    def input(self, name: str, dtype: ir.DataType, shape: Sequence[Size]) -> ir.Value:
        """A graph input; a dimension given as text is a symbol."""
        value = ir.Value(name=name, type=ir.TensorType(dtype), shape=ir.Shape(shape))
        self._inputs.append(value)
        return value

    def output(self, value: ir.Value, name: str, dtype: ir.DataType, shape: Sequence[Size]) -> None:
        """Make `value` the graph output `name`."""
        value.name, value.type, value.shape = name, ir.TensorType(dtype), ir.Shape(shape)
        self._outputs.append(value)

    @contextmanager
    def scope(self, name: str) -> Iterator[None]:
        """Names created inside begin with `name`."""
        self._scopes.append(name)
        yield
        self._scopes.pop()

    def op(self, kind: str, *inputs: ir.Value | None, **attributes: Any) -> ir.Value:
        """A node with one output."""
        return self.ops(kind, *inputs, outputs=1, **attributes)[0]

    def uses(self, domain: str, version: int) -> None:
        """Set the opset version of a domain. Without it, the version is 1."""
        self._opsets[domain] = version

    def ops(self, kind: str, *inputs: ir.Value | None, outputs: int, **attributes: Any) -> Sequence[ir.Value]:
        """A node with several outputs. An operator of another domain is named with it: `com.microsoft.Attention`."""
        domain, _, kind = kind.rpartition(".")
        if domain:
            self._opsets.setdefault(domain, 1)
        name = "/" + "/".join([*self._scopes, kind])
        self._names[name] += 1
        if self._names[name] > 1:
            name += f"_{self._names[name] - 1}"
        node = ir.node(kind, inputs, attributes, domain=domain, num_outputs=outputs, name=name)
        for index, value in enumerate(node.outputs):
            value.name = f"{name}_output_{index}"
        self._nodes.append(node)
        return node.outputs

    def weight(self, name: str, tensor: ir.TensorProtocol) -> ir.Value:
        """An initializer of this name, as it stands in a checkpoint."""
        value = ir.Value(
            name=name, type=ir.TensorType(tensor.dtype), shape=ir.Shape(tensor.shape.numpy()), const_value=tensor
        )
        self._weights[name] = value
        return value

    def constant(self, array: npt.ArrayLike, dtype: npt.DTypeLike) -> ir.Value:
        """A small constant as a node, as exporters write it."""
        return self.op("Constant", value=ir.tensor(np.asarray(array, dtype=dtype)))

    def model(self) -> ir.Model:
        """The finished model."""
        graph = ir.Graph(
            self._inputs,
            self._outputs,
            nodes=self._nodes,
            initializers=list(self._weights.values()),
            opset_imports=self._opsets,
            name="main_graph",
        )
        return ir.Model(graph, ir_version=8, producer_name="splitc.models")


def save(model: ir.Model, path: Path) -> None:
    """Write the model to `path` and its weights beside it, as NAME.onnx.data."""
    path.parent.mkdir(parents=True, exist_ok=True)
    ir.save(model, path, external_data=f"{path.name}.data", size_threshold_bytes=1024)
