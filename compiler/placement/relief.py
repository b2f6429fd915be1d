"""The weights that the planner may place by itself if blocks alone do not fit the budgets: experts and tables."""

from __future__ import annotations

import onnx_ir as ir

from splitc.compiler.analysis.costs import Costs
from splitc.compiler.operators.registry import operator_of
from splitc.compiler.placement.experts import find_experts
from splitc.compiler.placement.weights import placeable

# Minimum share of the weights of a table that is placed. A choice: less relieves hardly any device.
LEAST_SHARE = 0.01


def reliefs(costs: Costs) -> list[list[ir.Value]]:
    """Groups of weights that need little traffic, those that relieve a device most first.

    Tokens go to the experts of a layer and come back, and rows come from a table: about the same traffic for each. So
    the largest groups move the fewest bytes for their size. Weights that stay in files relieve no device.
    """
    uses = placeable(costs)
    experts = find_experts(costs)
    known = {weight for layer in experts for weight in layer}
    least = LEAST_SHARE * sum(map(costs.value_bytes, uses))
    tables = [
        [weight]
        for weight, use in uses.items()
        if weight not in known
        and costs.value_bytes(weight) >= least
        and any(node.inputs[table] is weight for node in use.readers for _, table in operator_of(node).lookups)
    ]
    groups = [[weight for weight in group if weight not in costs.in_files] for group in (*experts, *tables)]
    return sorted(filter(None, groups), key=lambda group: -sum(map(costs.value_bytes, group)))
