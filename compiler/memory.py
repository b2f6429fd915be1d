"""The bytes that a stage holds while it runs: weights, cache, and activations at their peak."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from splitc.compiler.liveness import liveness

if TYPE_CHECKING:
    from splitc.compiler.analysis import Analysis
    from splitc.compiler.split.layer import Stage


@dataclass(frozen=True)
class StageMemory:
    """Bytes of one stage. Cache is the states' inputs and outputs; activations are all other values at their peak."""

    weights: int
    activations: int
    cache: int

    @property
    def total(self) -> int:
        return self.weights + self.activations + self.cache


def stage_memory(analysis: Analysis, stage: Stage) -> StageMemory:
    """Predict what a stage holds with the bound shapes.

    What goes in and out is held for the whole run, as ONNX Runtime does with bound inputs and outputs; in between a
    value lives from the node that makes it to the last that reads it.
    """
    costs = analysis.costs
    states = {name for state in analysis.states for name in (state.input, state.output)}
    ends = dict.fromkeys([*stage.feeds, *stage.receives, *stage.outputs, *stage.sends])
    cache = [value for value in ends if value.name in states]
    inside = liveness(
        stage.nodes,
        analysis.graph.reads.__getitem__,
        lambda value: 0 if value in ends else costs.value_bytes(value),
    )
    held = sum(costs.value_bytes(value) for value in ends if value.name not in states)
    return StageMemory(
        weights=costs.weight_bytes(stage.nodes),
        activations=held + max(inside.bytes, default=0),
        cache=sum(map(costs.value_bytes, cache)),
    )
