"""A model whose axes are sharded over the ranks of a group."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import onnx_ir as ir

from splitc.compiler.frontend.graph import Graph
from splitc.compiler.operators import axes as ax
from splitc.compiler.operators.operation import Axes, Operation
from splitc.compiler.sharding.axis_map import AxisMap
from splitc.compiler.sharding.choice import Choice
from splitc.compiler.sharding.partial import NO_SUMS, Sums, chosen_atoms
from splitc.compiler.sharding.shards import Shards
from splitc.compiler.sharding.shares import Ranges, assign_units


@dataclass(frozen=True)
class ShardedModel:
    """A model's axes, each rank's units of the sharded axes (`ranges`), and the collectives (`sums`)."""

    graph: Graph
    axis_map: AxisMap
    ranges: Ranges
    ranks: int
    sums: Sums = NO_SUMS

    def shards(self, rank: int) -> Shards:
        """The shards of one rank."""
        return self._shards[rank]

    @cached_property
    def _shards(self) -> Sequence[Shards]:
        return [Shards({atom: parts[rank] for atom, parts in self.ranges.items()}) for rank in range(self.ranks)]

    def sizes(self, rank: int) -> tuple[int, ...]:
        """A rank's numbers of units of the sharded axes. Ranks with equal numbers hold and compute equally much."""
        return tuple([parts[rank].size for parts in self.ranges.values()])

    def owned_sizes(self, rank: int) -> tuple[int, ...]:
        """As `sizes`, with 0 for units that are replicas of another rank's."""
        return tuple([parts[rank].size * parts[rank].owned for parts in self.ranges.values()])

    def share(self, rank: int, node: ir.Node) -> float:
        """A rank's share of a node's work."""
        operation, shards = self.axis_map.operations[node], self.shards(rank)
        return shards.share(operation.outputs[0]) * shards.share((operation.contracted,))

    def axes(self, value: ir.Value) -> Axes:
        """The axes of a value of the model."""
        return self.axis_map.axes.get(value)

    def gives(self, rank: int, value: ir.Value) -> bool:
        """Whether a rank returns its shard of an output to the caller. The first rank returns replicated outputs."""
        axes = self.axes(value)
        present = {atom for axis in axes or () for atom in ax.atoms(axis)}
        owns = (self.shards(rank).owns(axis, present=present) for axis in axes or ())
        return all(owns) if chosen_atoms(axes, self.ranges) else rank == 0

    def owns(self, rank: int, operation: Operation) -> bool:
        """Whether a node sums over units that the rank owns, rather than over replicas of another rank's."""
        return self.shards(rank).owns(operation.contracted)

    def adds(self, rank: int, operation: Operation) -> bool:
        """Whether this is the rank that adds to a partial value what only one may add: the first that owns units."""
        return rank == next((other for other in range(self.ranks) if self.owns(other, operation)), 0)


def shard_model(
    graph: Graph, axis_map: AxisMap, choice: Choice, shares: Sequence[Sequence[float]], home: Mapping[ir.Value, int]
) -> ShardedModel:
    """Divide the chosen axes among the ranks of a group.

    `shares` are the shares of each group's ranks. `home` is, by weight, the number of the first group that has it.
    """
    weights = {candidate.atom: candidate.weights for candidate in choice.candidates}
    ranges = assign_units({atom: weights[atom] for atom in choice.chosen}, shares, home, choice.partners)
    return ShardedModel(graph, axis_map, ranges, len(shares[0]), choice.sums)
