"""Which inputs are states: fed, step after step, with an output of the step before (a cache's past and present)."""

from __future__ import annotations

from collections.abc import Iterator

import onnx_ir as ir

from splitc.compiler.frontend.graph import Graph
from splitc.compiler.operators.registry import operator_of
from splitc.runtime.manifest import State

# A present is made from its past by a few operations at most: a concatenation, a scatter, one attention operator.
FARTHEST = 8


def find_states(graph: Graph) -> list[State]:
    """Pairs of an input and the output that replaces it, in the order of the outputs.

    An output's past is the nearest input, upstream, of the same type, rank and fixed sizes that no nearer pair has
    taken. Where a node takes several (keys and values), inputs and outputs go together in their order.
    """
    distances = sorted(
        (distance, graph.graph.outputs.index(output), order, output, value)
        for output in graph.graph.outputs
        for order, (distance, value) in enumerate(_inputs_upstream(graph, output))
        if _is_alike(value, output)
    )
    pairs: dict[ir.Value, ir.Value] = {}
    for _, _, _, output, value in distances:
        if output not in pairs and value not in pairs.values():
            pairs[output] = value
    return [
        State(
            pairs[output].name or "",
            output.name or "",
            _grows(pairs[output], output),
            _is_in_place(pairs[output], output),
        )
        for output in graph.graph.outputs
        if output in pairs
    ]


def _grows(past: ir.Value, present: ir.Value) -> int | None:
    """The axis along which a step makes a state longer: the first symbol that is another one afterwards."""
    for axis, (before, after) in enumerate(zip(past.shape or (), present.shape or (), strict=False)):
        known = isinstance(after, int) or after.value is not None
        if isinstance(before, ir.SymbolicDim) and known and before != after:
            return axis
    return None


def _inputs_upstream(graph: Graph, output: ir.Value) -> Iterator[tuple[int, ir.Value]]:
    """The model's inputs above `output`, nearest first, as far as FARTHEST nodes."""
    seen: set[ir.Value] = {output}
    level = [output]
    for distance in range(FARTHEST):
        above = []
        for value in level:
            producer = value.producer()
            for read in graph.reads[producer] if producer is not None else ():
                if read not in seen and not read.is_initializer():
                    seen.add(read)
                    above.append(read)
                    if read.is_graph_input():
                        yield distance, read
        level = above


def _is_in_place(past: ir.Value, present: ir.Value) -> bool:
    """Whether the present is written by an operator that can write it over the past, which nothing else reads."""
    producer = present.producer()
    readers = [use.node for use in past.uses()]
    return producer is not None and operator_of(producer).in_place and readers == [producer]


def _is_alike(past: ir.Value, present: ir.Value) -> bool:
    """Same type, rank (two or more) and fixed sizes, but for one that grows, which is not the last."""
    if past.dtype != present.dtype or past.shape is None or present.shape is None:
        return False
    if len(past.shape) != len(present.shape) or len(past.shape) < 2:
        return False
    differ = [
        isinstance(a, int) and isinstance(b, int) and a != b for a, b in zip(past.shape, present.shape, strict=True)
    ]
    return sum(differ) <= 1 and not differ[-1]


def growing_symbols(graph: Graph, states: list[State]) -> frozenset[str]:
    """The symbols of lengths that a step adds to: sizes of a state's input that are other ones in its output."""
    values = {value.name: value for value in (*graph.graph.inputs, *graph.graph.outputs)}
    symbols = set()
    for state in states:
        past, present = values[state.input].shape, values[state.output].shape
        for before, after in zip(past or (), present or (), strict=False):
            if isinstance(before, ir.SymbolicDim) and before.value and before != after:
                symbols.add(before.value)
    return frozenset(symbols)
