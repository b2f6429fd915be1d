"""The weights of a model as users know them: by their readers and their names."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import onnx_ir as ir

from splitc.compiler.adapters.linear_layers import modules_of
from splitc.compiler.adapters.slots import is_slot_input
from splitc.compiler.analysis.costs import Costs
from splitc.compiler.analysis.rematerialization import NEGLIGIBLE_WEIGHT_BYTES
from splitc.compiler.normal_form.graph import Graph


@dataclass(frozen=True)
class WeightUse:
    """The nodes that read a weight, or a value computed from it alone, and the weight's names."""

    readers: tuple[ir.Node, ...]
    names: tuple[str, ...]


def weight_uses(graph: Graph) -> Mapping[ir.Value, WeightUse]:
    """The uses of each weight, in the order in which weights are read."""
    made: dict[ir.Value, WeightUse] = {}
    for weight, nodes in graph.uses.items():
        if readers := tuple(node for node in nodes if node not in graph.constant):
            made[weight] = WeightUse(readers, _names(weight, nodes))
    return made


def _names(weight: ir.Value, nodes: Sequence[ir.Node]) -> tuple[str, ...]:
    modules = (module for node in nodes for module in reversed(modules_of(node)))
    names = (weight.name or "", *modules, *(node.name or "" for node in nodes))
    return tuple(dict.fromkeys(filter(None, names)))


def placeable(costs: Costs) -> dict[ir.Value, WeightUse]:
    """The weights that are large enough to be placed. Smaller ones, and slots, go to their readers."""
    uses = weight_uses(costs.graph)
    return {
        weight: use
        for weight, use in uses.items()
        if costs.value_bytes(weight) > NEGLIGIBLE_WEIGHT_BYTES and not is_slot_input(weight)
    }
