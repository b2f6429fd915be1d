"""Finds islands: nodes whose weights could be sharded if their axes were independent of the nodes around them.

A node that needs an axis whole makes it whole in all nodes with that axis: a Softmax after the head keeps the head's
weight whole. An island has axes of its own. Each rank slices its inputs, without communication, and a collective sums
or joins its output. Shardy and GSPMD insert collectives in the same way where shardings differ.
"""

from __future__ import annotations

from collections.abc import Iterable

from splitc.compiler.adapters.slots import is_slot_input
from splitc.compiler.analysis.facts import Analysis
from splitc.compiler.operators import axes as ax
from splitc.compiler.operators.axes import Factor
from splitc.compiler.operators.operation import SUMMED, Axes, Operation
from splitc.compiler.sharding.axis_map import AxisMap, Island
from splitc.compiler.sharding.choice import Choice

# Minimum share of the model's weight bytes that an island reads. A choice: a collective for less saves little memory.
# With 1/64 the plans of 43 models on three devices are the same, without a limit those of 51 of 52.
LEAST_ISLAND = 1 / 256


def find_islands(analysis: Analysis, axis_map: AxisMap, choice: Choice) -> tuple[Island, ...]:
    """The nodes that read large weights which a choice does not shard, as islands, in the model's order."""
    graph = analysis.graph
    least = LEAST_ISLAND * sum(map(analysis.costs.constant_bytes, graph.graph.initializers.values()))
    islands = (
        _island(analysis, operation, choice.chosen, least)
        for node, operation in axis_map.operations.items()
        # A norm would need two collectives for a vector of weights.
        if node not in graph.constant and not operation.is_lookup and not operation.reduced
    )
    return tuple(island for island in islands if island is not None)


def _island(analysis: Analysis, operation: Operation, chosen: Iterable[Factor], least: float) -> Island | None:
    """A node that reads large weights, none of which is sharded, as an island; None for any other node."""
    graph, size = analysis.graph, analysis.costs.constant_bytes
    node, weights = operation.node, set[Factor]()
    for value, axes in operation.reads():
        if graph.is_constant(value) and size(value) >= least and not is_slot_input(value):
            weights.update(ax.atoms_of(axes))
    if not weights or not weights.isdisjoint(chosen) or len(node.outputs) != 1:
        return None
    inputs = [
        (place, axis)
        for place, value in enumerate(node.inputs)
        if value is not None and not graph.is_constant(value)
        for axis in _inside(operation.inputs[place], weights)
    ]
    output = node.outputs[0]
    # Collectives join shards by a sum. Outputs of other types are whole inside islands too.
    outputs = _inside(operation.outputs[0], weights) if output.dtype in SUMMED else []
    return Island(node, tuple(inputs), tuple(outputs)) if inputs or outputs else None


def _inside(axes: Axes, atoms: set[Factor]) -> list[int]:
    """The numbers of the axes that consist of these atoms alone."""
    return [number for number, axis in enumerate(axes or ()) if (own := set(ax.atoms(axis))) and own <= atoms]
