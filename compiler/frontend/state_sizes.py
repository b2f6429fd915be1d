"""Sizes of states that their operators determine, if the file has symbols for them."""

from __future__ import annotations

from collections.abc import Mapping

import onnx_ir as ir

from splitc.compiler.frontend.graph import Graph
from splitc.compiler.operators.registry import operator_of


def settle_state_sizes(graph: Graph) -> None:
    """Set these sizes on the model's inputs and outputs that are states, in place (`Operator.state_sizes`)."""
    for node in graph.nodes:
        operator = operator_of(node)
        if operator.state_sizes is None:
            continue
        for made, taken in operator.states.items():
            past = node.inputs[taken] if taken < len(node.inputs) else None
            if past is None or not past.is_graph_input() or made >= len(node.outputs):
                continue
            for value in (past, node.outputs[made]):
                _settle(value, operator.state_sizes(node))


def _settle(value: ir.Value, sizes: Mapping[int, int]) -> None:
    if value.shape is not None and max(sizes, default=0) < len(value.shape):
        value.shape = ir.Shape(
            [size if isinstance(size, int) else sizes.get(axis, size) for axis, size in enumerate(value.shape)]
        )
