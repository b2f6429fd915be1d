"""Adds transfers to a rank's graph, chained by tokens so that all ranks run them in one order."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import onnx_ir as ir

from splitc.compiler.frontend.editor import add_initializer
from splitc.compiler.lowering.communication import AFTER, DOMAIN, HALF, RECEIVE, SEND, first_token
from splitc.compiler.lowering.open_shapes import open_shape
from splitc.compiler.nodes import unused_name


class ChainedGraph:
    """A graph under construction, with the token of its last transfer. The first transfer takes a constant as token."""

    def __init__(self, graph: ir.Graph) -> None:
        self._graph = graph
        self._token: ir.Value | None = None
        values = (value for node in graph for value in node.outputs)
        self._names = {value.name for value in (*graph.inputs, *graph.initializers.values(), *values)}
        self._likes: dict[ir.DataType, ir.Value] = {}

    def send(self, value: ir.Value, peer: int) -> ir.Value:
        """Send a value to a rank. Returns the same value, for nodes that must run after the send."""
        assert value.dtype is not None
        return self._transfer(SEND, value, value.dtype, peer, f"{value.name}/sent{peer}")

    def receive(self, name: str, like: ir.Value, peer: int) -> ir.Value:
        """Receive a value from a rank. It has the type and the number of axes of `like`."""
        assert like.dtype is not None
        value = self._transfer(RECEIVE, self._like(like.dtype), like.dtype, peer, name)
        value.shape = open_shape(like)
        return value

    def run_before(self, values: Sequence[ir.Value]) -> None:
        """Make later transfers wait for the nodes that compute these values."""
        (self._token,) = self._operator(AFTER, [self._last, *values], {}, [f"{values[0].name}/computed"])

    def finish(self) -> ir.Graph:
        """The graph, topologically sorted."""
        self._graph.sort()
        return self._graph

    def _transfer(self, kind: str, value: ir.Value, dtype: ir.DataType, peer: int, name: str) -> ir.Value:
        kind += HALF if dtype == ir.DataType.FLOAT16 else ""
        result, self._token = self._operator(kind, [value, self._last], {"peer": peer}, [name, f"{name}/token"])
        result.type = ir.TensorType(dtype)
        return result

    @property
    def _last(self) -> ir.Value:
        """The token of the last chained operator; at first a constant."""
        if self._token is None:
            self._token = first_token(self._graph)
        return self._token

    def _operator(
        self, kind: str, inputs: Sequence[ir.Value], attributes: Mapping[str, int], outputs: Sequence[str]
    ) -> Sequence[ir.Value]:
        node = ir.node(kind, inputs, attributes, domain=DOMAIN, num_outputs=len(outputs), name=f"{outputs[0]}/{kind}")
        for value, name in zip(node.outputs, outputs, strict=True):
            value.name = self._unused(name)
        node.outputs[-1].type = ir.TensorType(ir.DataType.UINT8)  # the token
        self._graph.append(node)
        return node.outputs

    def _like(self, dtype: ir.DataType) -> ir.Value:
        """A constant of this type, from which ONNX Runtime infers the type of a received value."""
        if dtype not in self._likes:
            tensor = ir.tensor(np.zeros(1, dtype.numpy()), dtype, name=self._unused(f"splitc_{dtype.name}"))
            self._likes[dtype] = add_initializer(self._graph, tensor)
        return self._likes[dtype]

    def _unused(self, name: str) -> str:
        """The name, or one with primes that is unique among the graph's values."""
        return take_name(name, self._names)


def take_name(name: str | None, used: set[str | None]) -> str:
    """The name, or one with primes that is not used yet. It is added to the used ones."""
    used.add(name := unused_name(name, used))
    return name
