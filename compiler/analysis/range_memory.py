"""The memory of every run of blocks, found quickly: the search over cuts asks for thousands of runs."""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from itertools import accumulate

import onnx_ir as ir

from splitc.compiler.analysis.blocks import Partition
from splitc.compiler.analysis.costs import Costs
from splitc.compiler.analysis.liveness import peak_bytes
from splitc.compiler.analysis.memory import largest_product_weight, state_names
from splitc.runtime.manifest import State


class RangeMemory:
    """An upper bound of `stage_memory` for every run of blocks, put together from what is known of single blocks."""

    def __init__(self, costs: Costs, states: Sequence[State], partition: Partition) -> None:
        self._costs = costs
        blocks = partition.blocks
        names = state_names(states)
        outputs = frozenset(costs.graph.graph.outputs)
        self._own, self._shared = self._count_weights(partition)
        self._totals: dict[tuple[int, int], int] = {}
        self._loading = [largest_product_weight(costs, block.nodes) for block in blocks]
        self._rematerialized = [self._rematerialized_values(block.nodes, partition) for block in blocks]
        # Bytes of each block's model inputs and outputs: states count as cache.
        self._cache, self._ends = [0] * len(blocks), [0] * len(blocks)
        for number, block in enumerate(blocks):
            reads = {value for node in partition.with_upstream(block) for value in costs.graph.reads[node]}
            made = {value for node in block.nodes for value in node.outputs}
            for value in {value for value in reads if value.is_graph_input()} | (made & outputs):
                held = self._cache if value.name in names else self._ends
                held[number] += costs.value_bytes(value)
        home = {node: number for number, block in enumerate(blocks) for node in block.nodes}
        # The values that cross each cut, each with the block that makes it and the blocks that read it.
        self._crossing: list[list[tuple[ir.Value, int, set[int]]]] = [[] for _ in range(len(blocks) + 1)]
        for value, (maker, readers) in self._uses(home).items():
            for cut in range(maker + 1, max(readers) + 1):
                self._crossing[cut].append((value, maker, readers))
        self.cut_bytes = [sum(costs.value_bytes(value) for value, _, _ in crossing) for crossing in self._crossing]
        passing = {value for crossing in self._crossing for value, _, _ in crossing}
        self._inside = self._peaks_inside(partition, passing | outputs)

    def _count_weights(self, partition: Partition) -> tuple[list[int], dict[tuple[int, ...], int]]:
        """Bytes of the weights that only one block reads, summed up to each block; and of others, by their blocks."""
        readers: dict[ir.Value, list[int]] = {}
        for number, block in enumerate(partition.blocks):
            for weight in self._costs.weights(partition.with_upstream(block)):
                readers.setdefault(weight, []).append(number)
        own, shared = [0] * len(partition.blocks), Counter[tuple[int, ...]]()
        for weight, numbers in readers.items():
            if len(numbers) == 1:
                own[numbers[0]] += self._costs.value_bytes(weight)
            else:
                shared[tuple(numbers)] += self._costs.value_bytes(weight)
        return list(accumulate(own, initial=0)), dict(shared)

    def _rematerialized_values(self, nodes: Iterable[ir.Node], partition: Partition) -> frozenset[ir.Value]:
        """Rematerialized values that the nodes read. They may live as long as the stage."""
        reads = (value for node in nodes for value in self._costs.graph.reads[node])
        return frozenset(value for value in reads if value.producer() in partition.rematerializable)

    def _uses(self, home: Mapping[ir.Node, int]) -> dict[ir.Value, tuple[int, set[int]]]:
        """For each value that a block makes: this block, and the blocks that read the value."""
        uses: dict[ir.Value, tuple[int, set[int]]] = {}
        for node, number in home.items():
            for value in self._costs.graph.reads[node]:
                producer = value.producer()
                if producer is not None and producer in home:
                    uses.setdefault(value, (home[producer], set()))[1].add(number)
        return uses

    def _peaks_inside(self, partition: Partition, ends: AbstractSet[ir.Value]) -> list[int]:
        """For each block the peak bytes of the values that only this block makes and reads."""

        def size(value: ir.Value) -> int:
            return 0 if value in ends else self._costs.value_bytes(value)

        reads = self._costs.graph.reads.__getitem__
        return [peak_bytes(block.nodes, reads, size) for block in partition.blocks]

    def weights(self, start: int, end: int) -> int:
        """Bytes of the weights of the blocks from `start` to before `end`, each weight counted once."""
        shared = sum(
            size for blocks, size in self._shared.items() if bisect_left(blocks, start) < bisect_left(blocks, end)
        )
        return self._own[end] - self._own[start] + shared

    def total(self, start: int, end: int) -> int:
        """Bytes of weights, cache and activations of the blocks from `start` to before `end`."""
        if (start, end) not in self._totals:
            self._totals[start, end] = self._total(start, end)
        return self._totals[start, end]

    def _total(self, start: int, end: int) -> int:
        size = self._costs.value_bytes
        repeated = frozenset[ir.Value]().union(*self._rematerialized[start:end])
        held = {value for value, _, readers in self._crossing[start] if any(start <= r < end for r in readers)}
        held |= {value for value, maker, _ in self._crossing[end] if maker >= start}
        peak = 0
        for number in range(start, end):
            inner = [cut for cut in (number, number + 1) if start < cut < end]
            passing = {value for cut in inner for value, maker, _ in self._crossing[cut] if maker >= start}
            peak = max(peak, self._inside[number] + sum(map(size, passing - held)))
        activations = sum(self._ends[start:end]) + peak + sum(map(size, repeated | held))
        running = activations + sum(self._cache[start:end])
        return self.weights(start, end) + max(running, *self._loading[start:end])
