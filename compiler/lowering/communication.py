"""Communication nodes of a rank's graph: all-reduces and transfers.

All-reduces are `COLLECTIVE` nodes, as in TensorRT. Transfers are operators of splitc's library, chained by tokens so
that all ranks run them in one order. `engine_segments` chooses whether they run inside engines or between them.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

import numpy as np
import onnx_ir as ir

from splitc.compiler.graphs.editor import add_initializer
from splitc.compiler.graphs.origins import note_sizes, noted_sizes, origin_of, stand_for
from splitc.compiler.graphs.unused import remove_unused, remove_unused_inputs
from splitc.compiler.lowering.open_shapes import open_shape
from splitc.compiler.lowering.rank_forms import COLLECTIVE
from splitc.compiler.nodes import unused_name

DOMAIN = "splitc"
ALL_REDUCE, SEND, RECEIVE = "AllReduce", "Send", "Receive"
# The operator that makes later transfers wait for nodes that do not communicate.
AFTER = "After"
# The suffix of operators for float16. If one operator took both types, ONNX Runtime would run it in float32 on CPUs
# wherever it runs the neighbouring nodes in float32, which may differ between ranks.
HALF = "Half"
# The elements of the first token. ONNX Runtime moves a node from the GPU to the CPU if all its inputs are there, or are
# constants of at most 100 elements (GetCpuPreferredNodes, core/framework/fallback_cpu_capability.cc). Communication
# must stay on the GPU.
FIRST = 128
# The attribute `operation` of an all-reduce.
_OPERATIONS = {"sum": 0, "max": 1}


def communicates(node: ir.Node) -> bool:
    """Whether a node communicates with other ranks, or orders such nodes."""
    return node.op_type == COLLECTIVE or node.domain == DOMAIN


def kind_of(node: ir.Node) -> str:
    """The kind of a communication node, without the suffix for float16."""
    return node.op_type.removesuffix(HALF)


def use_operators(graph: ir.Graph, outputs: Collection[str]) -> ir.Graph:
    """Replace the collectives in `graph` by operators, in place, and keep only the named `outputs`. Returns the graph.

    Each operator takes the token of the one before it, the first one a constant. So all ranks run them in one order,
    however their engines order independent nodes. If nothing reads the last operator's result on this rank, its token
    becomes an output: else the engine would drop the operator, and other ranks would wait for it.
    """
    # A slice, since `del` would leave values marked as outputs.
    graph.outputs[:] = [value for value in graph.outputs if value.name in outputs]
    last: ir.Node | None = None
    for node in [node for node in graph if communicates(node)]:
        replaced = node.op_type == COLLECTIVE
        last = _replace(graph, node, first_token(graph) if last is None else last.outputs[-1]) if replaced else node
    if last is not None:
        graph.opset_imports[DOMAIN] = 1
        graph.outputs.append(last.outputs[-1])
    remove_unused(graph)
    if last is not None and (last.outputs[0].uses() or last.outputs[0].is_graph_output()):
        graph.outputs.pop()
    remove_unused_inputs(graph)
    return graph


def first_token(graph: ir.Graph) -> ir.Value:
    """A constant that the graph's first communication operator takes as its token."""
    return add_initializer(graph, ir.tensor(np.zeros(FIRST, np.uint8), name="splitc_first"))


def _replace(graph: ir.Graph, node: ir.Node, token: ir.Value) -> ir.Node:
    """Replace a collective by its operator, which takes the token of the one before it."""
    operation = _OPERATIONS[node.attributes.get_string("reduce_op", "sum")]
    kind = ALL_REDUCE + (HALF if node.outputs[0].dtype == ir.DataType.FLOAT16 else "")
    operator = ir.node(
        kind, [*node.inputs, token], {"operation": operation}, domain=DOMAIN, num_outputs=2, name=node.name
    )
    whole, token = operator.outputs
    token.name, token.type = f"{node.outputs[0].name}/token", ir.TensorType(ir.DataType.UINT8)
    stand_for(whole, origin_of(node.outputs[0]))
    note_sizes(whole, noted_sizes(node.outputs[0]))
    ir.convenience.replace_nodes_and_values(graph, node, [node], [operator], node.outputs, [whole])
    return operator


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
            value.name = take_name(name, self._names)
        node.outputs[-1].type = ir.TensorType(ir.DataType.UINT8)  # the token
        self._graph.append(node)
        return node.outputs

    def _like(self, dtype: ir.DataType) -> ir.Value:
        """A constant of this type, from which ONNX Runtime infers the type of a received value."""
        if dtype not in self._likes:
            tensor = ir.tensor(np.zeros(1, dtype.numpy()), dtype, name=take_name(f"splitc_{dtype.name}", self._names))
            self._likes[dtype] = add_initializer(self._graph, tensor)
        return self._likes[dtype]


def take_name(name: str | None, used: set[str | None]) -> str:
    """The name, or one with primes that is not used yet. It is added to the used ones."""
    used.add(name := unused_name(name, used))
    return name
