"""A rank's graph with its collectives as operators, for engines of ONNX Runtime that have them inside."""

from __future__ import annotations

from collections.abc import Collection

import onnx_ir as ir

from splitc.compiler.frontend.unused import remove_unused, remove_unused_inputs
from splitc.compiler.lowering.rank_forms import COLLECTIVE

DOMAIN = "splitc"
ALL_REDUCE = "AllReduce"
# Put behind the names of operators for values in half precision. On CPUs, ONNX Runtime would run others in single
# precision on some ranks: where it runs what is before and after them so.
HALF = "Half"
# The attribute `operation` of an all-reduce.
_OPERATIONS = {"sum": 0, "max": 1}


def use_operators(graph: ir.Graph, outputs: Collection[str]) -> ir.Graph:
    """Replace the collectives in `graph`, in place, and keep only the `outputs` named. Returns the graph.

    Each collective takes a token from the one before it, so all ranks run them in one order, however their engines
    order independent nodes. If this rank does not need what the last one computes, its token becomes an output: the
    other ranks wait for it all the same.
    """
    for place, value in reversed(list(enumerate(graph.outputs))):
        if value.name not in outputs:
            del graph.outputs[place]
    last: ir.Node | None = None
    for node in [node for node in graph if node.op_type == COLLECTIVE]:
        last = _replace(graph, node, None if last is None else last.outputs[1])
    if last is not None:
        graph.opset_imports[DOMAIN] = 1
        graph.outputs.append(last.outputs[1])
    remove_unused(graph)
    if last is not None and (last.outputs[0].uses() or last.outputs[0].is_graph_output()):
        graph.outputs.pop()
    remove_unused_inputs(graph)
    return graph


def _replace(graph: ir.Graph, node: ir.Node, token: ir.Value | None) -> ir.Node:
    """Put the operator in the place of a collective, behind the token of another one."""
    inputs = [*node.inputs, *([] if token is None else [token])]
    operation = _OPERATIONS[node.attributes.get_string("reduce_op", "sum")]
    kind = ALL_REDUCE + (HALF if node.outputs[0].dtype == ir.DataType.FLOAT16 else "")
    operator = ir.node(kind, inputs, {"operation": operation}, domain=DOMAIN, num_outputs=2, name=node.name)
    whole, token = operator.outputs
    token.name, token.type = f"{node.outputs[0].name}/token", ir.TensorType(ir.DataType.UINT8)
    ir.convenience.replace_nodes_and_values(graph, node, [node], [operator], node.outputs, [whole])
    return operator


def has_collectives_inside(graph: ir.Graph) -> bool:
    """Whether an engine of the graph exchanges values with other ranks while it runs."""
    return any(node.op_type == COLLECTIVE or node.domain == DOMAIN for node in graph)
