"""Communication nodes of a rank's graph: all-reduces and transfers.

All-reduces are `COLLECTIVE` nodes, as in TensorRT. Transfers are operators of splitc's library, chained by tokens so
that all ranks run them in one order. `engine_segments` chooses whether they run inside engines or between them.
"""

from __future__ import annotations

from collections.abc import Collection

import numpy as np
import onnx_ir as ir

from splitc.compiler.frontend.editor import add_initializer
from splitc.compiler.frontend.origins import note_sizes, noted_sizes, origin_of, stand_for
from splitc.compiler.frontend.unused import remove_unused, remove_unused_inputs
from splitc.compiler.lowering.rank_forms import COLLECTIVE

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
    for place, value in reversed(list(enumerate(graph.outputs))):
        if value.name not in outputs:
            del graph.outputs[place]
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
