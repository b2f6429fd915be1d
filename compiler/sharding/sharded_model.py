"""A model whose axes are sharded over the ranks of a group, and what a rank of it runs and holds."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property

import onnx_ir as ir

from splitc.compiler.analysis.costs import Costs
from splitc.compiler.analysis.facts import Analysis
from splitc.compiler.analysis.memory import Held
from splitc.compiler.analysis.stages import Stage
from splitc.compiler.graphs.walks import ancestors, producer_of, producers
from splitc.compiler.normal_form.graph import Graph
from splitc.compiler.operators import axes as ax
from splitc.compiler.operators.operation import Axes, Operation
from splitc.compiler.operators.operator import Shapes
from splitc.compiler.request.shapes import Shape
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
        present = set(ax.atoms_of(axes))
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


def rank_nodes(analysis: Analysis, sharded: ShardedModel, stage: Stage, part: int) -> Stage:
    """The stage with only the nodes that one rank runs: those that its outputs, kept states and collectives need."""
    names = {state.output for state in analysis.states}
    given = [value for value in stage.outputs if value.name in names or sharded.gives(part, value)]
    sums = sharded.sums
    roots = {*producers([*given, *stage.sends, *sums.exchanged]), *sums.reduced}
    needed = ancestors(roots, analysis.graph.reads.__getitem__)
    return replace(stage, nodes=tuple(node for node in stage.nodes if node in needed))


def held_shards(costs: Costs, sharded: ShardedModel, nodes: Collection[ir.Node], part: int) -> Held:
    """The bytes of one rank's shards: of the weights that the nodes read, and of any value."""
    shards, size = sharded.shards(part), costs.value_bytes
    constants = costs.held(nodes)
    uses: dict[ir.Value, list[Axes]] = {value: [] for value in constants}
    operations, folded = sharded.axis_map.operations, costs.graph.folded
    for operation in (operations[node] for node in nodes if node in operations and node not in folded):
        for value, axes in operation.reads():
            if value in uses:
                uses[value].append(axes)

    def held(value: ir.Value, read: Sequence[Axes]) -> int:
        unlike = read if len(read) < 2 else {shards.key(axes): axes for axes in read}.values()
        # A weight that only subgraphs read is whole.
        return sum(int(constants[value] * shards.share(axes)) for axes in unlike) or constants[value]

    weights = {value: held(value, read) for value, read in uses.items()}
    own = cache(lambda value: int(size(value) * shards.share(sharded.axes(value))))

    def shapes(node: ir.Node) -> tuple[Shapes, Shapes]:
        whole, operation = costs.shapes_of(node), operations.get(node)
        if operation is None:
            return whole
        inputs, outputs = (
            [_own(shards, *both) for both in zip(axes, of_whole, strict=True)]
            for axes, of_whole in zip((operation.inputs, operation.outputs), whole, strict=True)
        )
        return inputs, outputs

    return Held(weights, own, shapes, summed_parts(sharded, part))


def summed_parts(sharded: ShardedModel, part: int) -> Mapping[ir.Value, ir.Value]:
    """The all-reduced values, each with the rank's summand: the value itself, or the only input that the rank adds."""
    return {value: _passed_on(sharded, part, value) or value for value in sharded.sums.summed}


def _passed_on(sharded: ShardedModel, part: int, value: ir.Value) -> ir.Value | None:
    """The only input of an addition that a rank adds, if another rank adds the others (rank_graph.py); else None."""
    node = producer_of(value)
    operation, added = sharded.axis_map.operations[node], sharded.sums.added_on_one_rank.get(node, frozenset())
    contracts = bool(chosen_atoms([operation.contracted], sharded.ranges))
    left = [value for number, value in enumerate(node.inputs) if number not in added]
    return left[0] if len(left) == 1 and added and not contracts and not sharded.adds(part, operation) else None


def _own(shards: Shards, axes: Axes, shape: Shape) -> Shape:
    """A rank's shape of a value of this whole shape. The axes may have probe sizes, so only their ratio counts."""
    if axes is None or len(axes) != len(shape):
        return shape
    return tuple(size * shards.size(axis) // max(1, ax.size_of(axis)) for axis, size in zip(axes, shape, strict=True))
