"""What the planner may place by itself, where blocks alone do not fit the budgets: experts, and tables of rows."""

from __future__ import annotations

import onnx_ir as ir

from splitc.compiler.analysis.costs import Costs
from splitc.compiler.operators.registry import operator_of
from splitc.compiler.placement.experts import find_experts
from splitc.compiler.placement.weights import placeable

# A table is worth a place of its own from this share of the weights on. A choice: less relieves hardly any device.
LEAST_SHARE = 0.01


def reliefs(costs: Costs) -> list[list[ir.Value]]:
    """Groups of weights that little is sent for, those that relieve a device most first.

    Tokens go to the experts of a layer and come back, and rows come from a table: about as much for each. So the
    largest ones move the fewest bytes. What stays in files anyway relieves nobody.
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
