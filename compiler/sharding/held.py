"""The bytes of a rank's shards."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from functools import cache

import onnx_ir as ir

from splitc.compiler.analysis.costs import Costs
from splitc.compiler.analysis.memory import Held
from splitc.compiler.operators.operation import Axes
from splitc.compiler.sharding.sharded_model import ShardedModel


def held_shards(costs: Costs, sharded: ShardedModel, nodes: Collection[ir.Node], part: int) -> Held:
    """The bytes of one rank's shards of the nodes' weights, and of any value."""
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
    return Held(weights, own, frozenset(sharded.sums.summed))
