"""No-ops that ONNX Runtime removes: additions of 0 and multiplications by 1."""

from __future__ import annotations

from dataclasses import replace

import onnx_ir as ir

from splitc.compiler.execution.convolutions import resolve
from splitc.compiler.execution.engine_graph import EngineGraph
from splitc.compiler.execution.liveness import Nodes
from splitc.compiler.fusion.operand import constant

# The number that changes nothing, on either side where the order does not matter.
_NEUTRAL = {"Add": 0.0, "Sub": 0.0, "Mul": 1.0, "Div": 1.0}
_COMMUTATIVE = ("Add", "Mul")


def without_noops(graph: EngineGraph) -> EngineGraph:
    """The graph without no-ops (core/optimizer/noop_elimination.cc).

    Exporters write them where a model's factor is 1. Those whose result leaves the engine stay. An all-reduce after a
    no-op adds the no-op's input.
    """
    unchanged = {node: source for node in graph.nodes if (source := _unchanged(node)) is not None}
    if not unchanged:
        return graph
    nodes = Nodes(graph.nodes, graph.reads)
    computed = {value for node in graph.nodes for value in node.outputs}
    exchanged = {value for one in graph.rounds for value in (*one.takes, *(v for sent in one.sent for v in sent))}
    same = dict[ir.Value, ir.Value]()
    for node, source in unchanged.items():
        made = node.outputs[0]
        if made in graph.kept or made in exchanged:
            continue
        if made not in graph.summed or (source in computed and nodes.only_reader(source) is node):
            same[made] = source
    return replace(
        graph,
        nodes=[node for node in graph.nodes if node.outputs[0] not in same],
        reads=lambda node: [resolve(same, value) for value in graph.reads(node)],
        summed={resolve(same, value): resolve(same, part) for value, part in graph.summed.items()},
        same=same,
    )


def _unchanged(node: ir.Node) -> ir.Value | None:
    """The input that a node passes on unchanged; None if it changes the values or the shape."""
    neutral = _NEUTRAL.get(node.op_type) if not node.domain else None
    if neutral is None:
        return None
    one, other = node.inputs
    if node.op_type in _COMMUTATIVE and constant(one) is not None:
        one, other = other, one
    if one is None or other is None or constant(one) is not None or constant(other) != neutral:
        return None
    axes = len(other.shape) if other.shape is not None else 0
    return one if axes <= (len(one.shape) if one.shape is not None else 0) else None
