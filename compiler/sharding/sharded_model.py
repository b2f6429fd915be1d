"""A model whose axes are sharded over the ranks of a group: which units of each axis a rank has."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import onnx_ir as ir

from splitc.compiler.analysis.facts import Analysis
from splitc.compiler.frontend.graph import Graph
from splitc.compiler.operators.operation import Axes, Operation
from splitc.compiler.sharding.axis_map import AxisMap, find_axes
from splitc.compiler.sharding.choice import Choice, choose
from splitc.compiler.sharding.probe_sizes import bind_probe_sizes
from splitc.compiler.sharding.shards import Shards
from splitc.compiler.sharding.shares import Ranges, assign_units


@dataclass(frozen=True)
class ShardedModel:
    """A model's axes, which of them are sharded over so many ranks, and which units each rank has."""

    graph: Graph
    axis_map: AxisMap
    choice: Choice
    ranges: Ranges
    ranks: int

    def shards(self, rank: int) -> Shards:
        """The part of one rank."""
        return self._shards[rank]

    @cached_property
    def _shards(self) -> Sequence[Shards]:
        return [Shards({atom: each[rank] for atom, each in self.ranges.items()}) for rank in range(self.ranks)]

    def axes(self, value: ir.Value) -> Axes:
        """The axes of a value of the model."""
        return self.axis_map.axes.get(value)

    def counts(self, rank: int, operation: Operation) -> bool:
        """Whether the rank contracts anything of its own at a node, and not just copies of another rank's units."""
        return self.shards(rank).counts(operation.contracted)

    def adds(self, rank: int, operation: Operation) -> bool:
        """Whether it is this rank that adds what only one may add to a partial value: the first that counts."""
        return rank == next((other for other in range(self.ranks) if self.counts(other, operation)), 0)


def shard_model(analysis: Analysis, shares: Sequence[Sequence[float]], home: Mapping[ir.Value, int]) -> ShardedModel:
    """Find the model's axes and divide them among the ranks of a group.

    `shares` are those of each group's ranks, and `home` the number of the first group that has a weight.
    """
    graph, costs = analysis.graph, analysis.costs
    axis_map = find_axes(graph, bind_probe_sizes(graph, analysis.shapes, costs.certain))
    choice = choose(graph, axis_map, costs.value_bytes, len(shares[0]))
    return ShardedModel(graph, axis_map, choice, assign_units(choice, shares, home), len(shares[0]))
