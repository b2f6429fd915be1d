"""The batch axis: it passes through the whole model, and no node mixes its rows."""

from __future__ import annotations

from splitc.compiler.frontend.graph import Graph
from splitc.compiler.operators import axes as ax
from splitc.compiler.sharding.axis_map import AxisMap


def find_batch(graph: Graph, axis_map: AxisMap) -> dict[str, int] | None:
    """The number of the batch axis in each output, and in each input that has one, by name. None if there is no batch.

    The batch is a single factor, alone on its axis, of dynamic size. All outputs have it and no weight does. No node
    needs it whole, sums over it or picks from it.
    """
    summed = {atom for operation in axis_map.operations.values() for atom in ax.atoms(operation.contracted)}
    weighted = {atom for _, axes in axis_map.weight_uses() for axis in axes or () for atom in ax.atoms(axis)}
    places: dict[ax.Factor, dict[str, int]] = {}
    for value in (*graph.graph.inputs, *graph.graph.outputs):
        for number, axis in enumerate(axis_map.axes.get(value) or ()):
            leaves = ax.leaves(axis)
            fixed = value.shape is None or isinstance(value.shape[number], int)
            if len(leaves) == 1 and leaves[0].is_atom and not fixed:
                places.setdefault(leaves[0], {}).setdefault(value.name or "", number)
    outputs = {value.name for value in graph.outputs}
    for atom, number_of in places.items():
        if outputs <= number_of.keys() and atom.pinned is None and atom not in summed and atom not in weighted:
            return number_of
    return None
