"""Finds states of token shift (RWKV): the last token's values, which are mixed with those of the next token.

Such an output does not depend on the input that takes it in the next request. But the input is read only where the
output's value is read too: in a weighted sum of both, or in a Concat before the other tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence

import onnx_ir as ir

from splitc.compiler.graphs.walks import reached
from splitc.compiler.nodes import inputs_of
from splitc.compiler.normal_form.graph import Graph
from splitc.compiler.operators.registry import operator_of

# Operators that mix two tokens' values.
MIXES = ("Add", "Sub", "Concat")


def find_shifted(
    graph: Graph,
    outputs: Iterable[ir.Value],
    inputs: Sequence[ir.Value],
    is_alike: Callable[[ir.Value, ir.Value], bool],
) -> dict[ir.Value, ir.Value]:
    """Pairs of such states: the inputs, by the outputs that they take in the next request."""
    readers = {value: set(_readers(graph, [value])) for value in inputs}
    pairs: dict[ir.Value, ir.Value] = {}
    for output in outputs:
        own = set(_readers(graph, reached([output], _data)))
        for value in inputs:
            is_free = output not in pairs and value not in pairs.values()
            if is_free and is_alike(value, output) and readers[value] and readers[value] <= own:
                pairs[output] = value
    return pairs


def _data(value: ir.Value) -> Sequence[ir.Value]:
    """The value that a value is a part of, or a rearrangement of."""
    node = value.producer()
    if node is None or not (node.op_type == "Gather" or operator_of(node).rearranges):
        return []
    return [read for read in node.inputs[:1] if read is not None]


def _readers(graph: Graph, values: Iterable[ir.Value]) -> Iterator[ir.Node]:
    """The nodes that read these values, also through nodes that rearrange them or multiply them by weights."""

    def passed_on(value: ir.Value) -> Iterator[ir.Value]:
        for node in {use.node for use in value.uses()}:
            if _passes(graph, node, value):
                yield from node.outputs

    for value in reached(values, passed_on):
        yield from (use.node for use in value.uses() if not _passes(graph, use.node, value))


def _passes(graph: Graph, node: ir.Node, value: ir.Value) -> bool:
    if node.op_type in MIXES:
        return False
    weighted = node.op_type == "Mul" and any(graph.is_constant(read) for read in inputs_of(node))
    return weighted or (operator_of(node).rearranges and node.inputs[0] is value)
