"""Where values enter or leave islands: shards are sliced out of the whole value, or joined by a collective."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass

import onnx_ir as ir

from splitc.compiler.operators import axes as ax
from splitc.compiler.operators.axes import Axis, Factor
from splitc.compiler.sharding.axis_map import AxisMap


@dataclass(frozen=True)
class Side:
    """Axis `number` of a value, with its factors before and after the crossing."""

    number: int
    before: Axis
    after: Axis


@dataclass(frozen=True)
class Crossing:
    """A value of `axes` axes that enters an island as the input `place` of its node, or leaves it (`place` is None)."""

    node: ir.Node
    place: int | None
    value: ir.Value
    axes: int
    sides: tuple[Side, ...]

    def is_joined(self, chosen: Collection[Factor]) -> bool:
        """Whether ranks have shards before the crossing, which must be joined."""
        return any(_divides(side.before, chosen) for side in self.sides)

    def is_cut(self, chosen: Collection[Factor]) -> bool:
        """Whether ranks have shards after the crossing, which they slice out of the whole value."""
        return any(_divides(side.after, chosen) for side in self.sides)


def _divides(axis: Axis, chosen: Collection[Factor]) -> bool:
    return any(atom in chosen for atom in ax.atoms(axis))


def crossings(axis_map: AxisMap) -> Iterator[Crossing]:
    """All values that enter or leave islands."""
    for island in axis_map.islands:
        node, operation = island.node, axis_map.operations[island.node]
        for place in dict.fromkeys(place for place, _ in island.inputs):
            value = node.inputs[place]
            assert value is not None
            outside, inside = axis_map.axes[value] or (), operation.input(place)
            sides = [Side(axis, outside[axis], inside[axis]) for number, axis in island.inputs if number == place]
            yield Crossing(node, place, value, len(inside), tuple(sides))
        if island.outputs:
            value = node.outputs[0]
            outside, inside = axis_map.axes[value] or (), operation.output()
            sides = [Side(axis, inside[axis], outside[axis]) for axis in island.outputs]
            yield Crossing(node, None, value, len(inside), tuple(sides))
