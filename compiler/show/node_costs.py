"""A plan's predictions for each node: its time, and the bytes that it reads and writes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import onnx_ir as ir

from splitc.compiler.analysis.costs import nominal_speed
from splitc.compiler.nodes import operator_name
from splitc.compiler.planning.plan import Plan
from splitc.compiler.planning.rank_plan import RankPlan

# The block of nodes that several stages compute, each for itself.
EVERYWHERE = "rematerialized"


@dataclass(frozen=True)
class NodeCost:
    """A node of the model, its block, the ranks that run it, and its cost on them.

    - `weights`: the bytes of weights that it reads, before they are split.
    - `made`: the bytes of its outputs, before they are split.
    """

    name: str
    operator: str
    block: str
    ranks: str
    seconds: float
    weights: int
    made: int


def find_costs(plan: Plan) -> list[NodeCost]:
    """The nodes of all stages in order. A rank's predicted time is divided among its nodes by operations and bytes."""
    ranks = plan.written.ranks
    groups = [[rank for rank in ranks if rank.group == group] for group in sorted({rank.group for rank in ranks})]
    return [cost for members in groups for cost in _costs_of(plan, members)]


def _costs_of(plan: Plan, members: Sequence[RankPlan]) -> list[NodeCost]:
    """The nodes of a stage. Nodes that its ranks share take as long as on the slowest rank."""
    costs, stage = plan.analysis.costs, members[0].stage
    speed = nominal_speed(members[0].device.kind)
    blocks = {node: block.name for block in stage.blocks for node in block.nodes}
    numbers = [plan.written.ranks.index(rank) for rank in members]
    named = f"{numbers[0]}" if len(numbers) == 1 else f"{numbers[0]}-{numbers[-1]}"
    running = [node for node in stage.nodes if node not in costs.graph.folded]
    shares = [costs.seconds(node, speed) for node in running]
    worth = max(rank.seconds for rank in members) / (sum(shares) or 1.0)
    return [
        NodeCost(
            _name(node),
            operator_name(node),
            blocks.get(node, EVERYWHERE),
            named,
            share * worth,
            costs.weight_bytes([node]),
            sum(map(costs.value_bytes, node.outputs)),
        )
        for node, share in zip(running, shares, strict=True)
    ]


def _name(node: ir.Node) -> str:
    return node.name or node.outputs[0].name or ""
