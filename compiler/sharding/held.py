"""The bytes of a rank's shards, for its memory, and the nodes that a rank runs."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import cache

import onnx_ir as ir

from splitc.compiler.analysis.costs import Costs
from splitc.compiler.analysis.memory import Held
from splitc.compiler.analysis.stages import Stage
from splitc.compiler.frontend.walks import ancestors, producer_of, producers
from splitc.compiler.operators import axes as ax
from splitc.compiler.operators.operation import Axes
from splitc.compiler.operators.operator import Shapes
from splitc.compiler.request.shapes import Shape
from splitc.compiler.sharding.partial import chosen_atoms
from splitc.compiler.sharding.sharded_model import ShardedModel
from splitc.compiler.sharding.shards import Shards
from splitc.runtime.package.states import State


def rank_nodes(costs: Costs, sharded: ShardedModel, states: Iterable[State], stage: Stage, part: int) -> Stage:
    """The stage with only the nodes that one rank runs: those that its outputs, kept states and collectives need."""
    names = {state.output for state in states}
    given = [value for value in stage.outputs if value.name in names or sharded.gives(part, value)]
    sums = sharded.sums
    roots = {*producers([*given, *stage.sends, *sums.exchanged]), *sums.reduced}
    needed = ancestors(roots, costs.graph.reads.__getitem__)
    return replace(stage, nodes=tuple(node for node in stage.nodes if node in needed))


def held_shards(costs: Costs, sharded: ShardedModel, nodes: Collection[ir.Node], part: int) -> Held:
    """The bytes of one rank's shards: of the weights that the nodes read, and of any value."""
    shards, size = sharded.shards(part), costs.value_bytes
    constants = costs.held(nodes)
    uses: dict[ir.Value, list[Axes]] = {value: [] for value in constants}
    operations, folded = sharded.axis_map.operations, costs.graph.folded
    for node, operation in ((node, operations[node]) for node in nodes if node in operations and node not in folded):
        for value, axes in zip(node.inputs, operation.inputs, strict=True):
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
