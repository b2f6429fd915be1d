"""The bytes of a rank's shards."""

from __future__ import annotations

from collections.abc import Collection

import onnx_ir as ir

from splitc.compiler.analysis.costs import Costs
from splitc.compiler.analysis.memory import Held
from splitc.compiler.sharding.sharded_model import ShardedModel


def held_shards(costs: Costs, sharded: ShardedModel, nodes: Collection[ir.Node], part: int) -> Held:
    """The bytes of the shards that one rank of a group holds: of the nodes' weights, and of any value."""
    shards, size = sharded.shards(part), costs.value_bytes
    own = frozenset(nodes)
    parts: dict[tuple[ir.Value, bytes], int] = {}
    for node, operation in sharded.axis_map.operations.items():
        for value, axes in zip(node.inputs, operation.inputs, strict=True) if node in own else ():
            if value is not None and value.is_initializer():
                parts[value, shards.key(axes)] = int(size(value) * shards.share(axes))
    weights: dict[ir.Value, int] = dict.fromkeys(costs.weights(nodes), 0)
    for (value, _), held in parts.items():
        weights[value] += held
    for value in weights:  # a weight that only subgraphs read is whole
        weights[value] = weights[value] or size(value)
    return Held(weights, lambda value: int(size(value) * shards.share(sharded.axes(value))))
