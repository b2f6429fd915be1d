"""The bytes that a stage holds while it runs: weights, cache, and activations at their peak."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import onnx_ir as ir

from splitc.compiler.blocks import Partition
from splitc.compiler.costs import Costs
from splitc.compiler.liveness import liveness
from splitc.compiler.split.layer import Stage
from splitc.runtime.manifest import State


@dataclass(frozen=True)
class StageMemory:
    """Bytes of one stage. Cache is the states' inputs and outputs; activations are all other values at their peak."""

    weights: int
    activations: int
    cache: int

    @property
    def total(self) -> int:
        return self.weights + self.activations + self.cache


def stage_memory(costs: Costs, states: Sequence[State], stage: Stage) -> StageMemory:
    """Predict what a stage holds with the bound shapes.

    What goes in and out is held for the whole run, as ONNX Runtime does with bound inputs and outputs; in between a
    value lives from the node that makes it to the last that reads it.
    """
    names = state_names(states)
    ends = dict.fromkeys([*stage.feeds, *stage.receives, *stage.outputs, *stage.sends])
    inside = liveness(
        stage.nodes, costs.graph.reads.__getitem__, lambda value: 0 if value in ends else costs.value_bytes(value)
    )
    return StageMemory(
        weights=costs.weight_bytes(stage.nodes),
        activations=sum(costs.value_bytes(value) for value in ends if value.name not in names)
        + max(inside.bytes, default=0),
        cache=sum(costs.value_bytes(value) for value in ends if value.name in names),
    )


def state_names(states: Iterable[State]) -> frozenset[str]:
    """The names of all inputs and outputs that are states."""
    return frozenset(name for state in states for name in (state.input, state.output))


class RangeMemory:
    """`stage_memory` for every run of blocks, quickly, and never less than what the stage will hold.

    The planner asks for thousands of runs, so all is put together from what is known of single blocks.
    """

    def __init__(self, costs: Costs, states: Sequence[State], partition: Partition) -> None:
        self._costs = costs
        blocks = partition.blocks
        home = {node: number for number, block in enumerate(blocks) for node in block.nodes}
        names = state_names(states)
        self._weights = [frozenset(costs.weights(partition.with_free(block))) for block in blocks]
        self._weight_bytes: dict[tuple[int, int], int] = {}
        self._cache = [0] * len(blocks)
        self._ends = [0] * len(blocks)
        self.cut_bytes = [0] * (len(blocks) + 1)
        self._free = [self._free_values(block.nodes, partition) for block in blocks]
        outputs = frozenset(costs.graph.graph.outputs)
        for number, block in enumerate(blocks):
            nodes = partition.with_free(block)
            feeds = {value for node in nodes for value in costs.graph.reads[node] if value.is_graph_input()}
            made = {value for node in block.nodes for value in node.outputs if value in outputs}
            for value in feeds | made:
                held = self._cache if value.name in names else self._ends
                held[number] += costs.value_bytes(value)
        for value, (first, last) in self._block_spans(home).items():
            for cut in range(first + 1, last + 1):
                self.cut_bytes[cut] += costs.value_bytes(value)
        self._peaks = self._block_peaks(partition, home)

    def _block_spans(self, home: Mapping[ir.Node, int]) -> dict[ir.Value, tuple[int, int]]:
        """For each value that a block makes, its block and the last one that reads it."""
        spans: dict[ir.Value, tuple[int, int]] = {}
        for node, number in home.items():
            for value in self._costs.graph.reads[node]:
                producer = value.producer()
                if producer is not None and producer in home:
                    first, last = spans.get(value, (home[producer], 0))
                    spans[value] = first, max(last, number)
        return spans

    def _free_values(self, nodes: Iterable[ir.Node], partition: Partition) -> frozenset[ir.Value]:
        """What free nodes make that the blocks' nodes read: it may live as long as the stage."""
        reads = (value for node in nodes for value in self._costs.graph.reads[node])
        return frozenset(value for value in reads if value.producer() in partition.free)

    def _block_peaks(self, partition: Partition, home: Mapping[ir.Node, int]) -> list[int]:
        """For each block the most bytes that are alive within it, what passes by included."""
        spine = [node for block in partition.blocks for node in block.nodes]
        live = liveness(spine, self._costs.graph.reads.__getitem__, self._costs.value_bytes).bytes
        peaks = [0] * len(partition.blocks)
        for position, node in enumerate(spine):
            after = live[position + 1] if position + 1 < len(live) else 0
            peaks[home[node]] = max(peaks[home[node]], live[position], after)
        return peaks

    def weights(self, start: int, end: int) -> int:
        """Bytes of the weights of the blocks from `start` to before `end`; one that several read counts once."""
        if (start, end) not in self._weight_bytes:
            seen: set[ir.Value] = set()
            total = 0
            for number in range(start, len(self._weights)):
                total += sum(self._costs.value_bytes(weight) for weight in self._weights[number] - seen)
                seen |= self._weights[number]
                self._weight_bytes[start, number + 1] = total
        return self._weight_bytes[start, end]

    def total(self, start: int, end: int) -> int:
        """Bytes of weights, cache and activations of the blocks from `start` to before `end`."""
        free = frozenset[ir.Value]().union(*self._free[start:end])
        held = sum(self._ends[start:end]) + self.cut_bytes[start] + self.cut_bytes[end]
        activations = held + max(self._peaks[start:end]) + sum(map(self._costs.value_bytes, free))
        return self.weights(start, end) + sum(self._cache[start:end]) + activations
