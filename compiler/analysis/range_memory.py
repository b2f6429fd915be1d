"""The memory of ranges of blocks: a lower bound that is fast to compute, and the exact prediction."""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from itertools import accumulate

import onnx_ir as ir

from splitc.compiler.analysis.blocks import Partition
from splitc.compiler.analysis.costs import Costs
from splitc.compiler.analysis.memory import overwritten, stage_memory, state_names
from splitc.compiler.analysis.stages import divide_blocks
from splitc.compiler.execution.liveness import peak_bytes
from splitc.compiler.execution.order import execution_order
from splitc.runtime.package.states import State


class RangeMemory:
    """The bytes of a stage, for each range of blocks from number `start` to before number `end`.

    The search over cuts needs thousands of ranges. The lower bound is computed from single blocks: the bytes that a
    stage holds throughout, and the highest peak of a block with the nodes that are rematerialized for it.
    """

    def __init__(self, costs: Costs, states: Sequence[State], partition: Partition) -> None:
        self._costs, self._states, self._partition = costs, states, partition
        size, names, over = costs.value_bytes, state_names(states), overwritten(states)
        outputs = frozenset(costs.graph.graph.outputs)
        # Shape nodes read no value if the stage finds its sizes elsewhere.
        needed = [partition.with_upstream(block) - partition.shapes for block in partition.blocks]
        reads = [{value for node in nodes for value in costs.graph.reads[node]} for nodes in needed]
        made = [{value for node in block.nodes for value in node.outputs} for block in partition.blocks]
        ends = [
            {value for value in read if value.is_graph_input() and value.name not in over} | (given & outputs)
            for read, given in zip(reads, made, strict=True)
        ]
        weights = [
            {weight: costs.weight_in_memory(weight, size) for weight, size in costs.held(nodes).items()}
            for nodes in needed
        ]
        self._weights = _NeededBytes(weights)
        self._in_files = _NeededBytes(
            {v: costs.in_files[v] for v in own.keys() & costs.in_files.keys()} for own in weights
        )
        # What is fed, and what is kept from one request to the next.
        self._ends = _NeededBytes({v: size(v) for v in own if v.is_graph_input() or v.name in names} for own in ends)
        self._given = [sum(size(value) for value in given & outputs if value.name not in names) for given in made]
        self._crossing = self._find_crossing()
        self.cut_bytes = [sum(size(value) for value, _, _ in crossing) for crossing in self._crossing]
        # Values that cross a cut or leave the model are held throughout, and are no part of a peak.
        held = outputs.union(value for crossing in self._crossing for value, _, _ in crossing)
        self._peaks = [self._peak(nodes, held) for nodes in needed]
        self._outputs = outputs
        self._bounds: dict[tuple[int, int], int] = {}
        self._exact: dict[tuple[int, int], int] = {}

    def _find_crossing(self) -> list[list[tuple[ir.Value, int, set[int]]]]:
        """The values that cross each cut, each with its producer's block and its readers' blocks."""
        home = {node: number for number, block in enumerate(self._partition.blocks) for node in block.nodes}
        uses: dict[ir.Value, tuple[int, set[int]]] = {}
        for node, number in home.items():
            for value in self._costs.graph.reads[node]:
                producer = value.producer()
                if producer is not None and producer in home:
                    uses.setdefault(value, (home[producer], set()))[1].add(number)
        crossing: list[list[tuple[ir.Value, int, set[int]]]] = [[] for _ in range(len(self._partition.blocks) + 1)]
        for value, (maker, readers) in uses.items():
            for cut in range(maker + 1, max(readers) + 1):
                crossing[cut].append((value, maker, readers))
        return crossing

    def _peak(self, nodes: AbstractSet[ir.Node], held: AbstractSet[ir.Value]) -> int:
        """The peak bytes of some nodes (a block's, and those rematerialized for it), without values in `held`."""

        def size(value: ir.Value) -> int:
            return 0 if value in held else self._costs.value_bytes(value)

        graph = self._costs.graph
        reads = graph.reads.__getitem__
        return peak_bytes(execution_order(sorted(nodes, key=graph.position.__getitem__), reads), reads, size)

    def weights(self, start: int, end: int) -> int:
        """Bytes of the weights, each counted once."""
        return self._weights.of(start, end)

    def at_least(self, start: int, end: int) -> int:
        """A lower bound of `exact`; the exact bytes if they are already known."""
        if (start, end) in self._exact:
            return self._exact[start, end]
        if (start, end) not in self._bounds:
            self._bounds[start, end] = self._bound(start, end)
        return self._bounds[start, end]

    def exact(self, start: int, end: int) -> int:
        """Bytes of weights, cache and activations, by `stage_memory`."""
        if (start, end) not in self._exact:
            ends = sorted({start, end, len(self._partition.blocks)} - {0})
            stages = divide_blocks(self._costs.graph, self._partition, ends)
            memory = stage_memory(self._costs, self._states, stages[ends.index(end)])
            self._exact[start, end] = memory.total
        return self._exact[start, end]

    def _bound(self, start: int, end: int) -> int:
        """The lower bound: bytes held throughout (weights, inputs, states, received values), plus the highest peak.

        A block's peak includes the values of earlier blocks for later stages or the caller.
        """
        size = self._costs.value_bytes
        received = {value for value, _, readers in self._crossing[start] if any(start <= r < end for r in readers)}
        given = self._given[start:end]
        for value, maker, _ in self._crossing[end]:
            if maker >= start and value not in self._outputs:
                given[maker - start] += size(value)
        before = accumulate(given, initial=0)
        peak = max(own + made for own, made in zip([*self._peaks[start:end], 0], before, strict=True))
        held = sum(map(size, received)) + self._ends.of(start, end)
        return self.weights(start, end) - self._in_files.of(start, end) + held + peak


class _NeededBytes:
    """The bytes of values that a range of blocks needs, each counted once. `needed` has those of each block."""

    def __init__(self, needed: Iterable[Mapping[ir.Value, int]]) -> None:
        blocks: dict[ir.Value, list[int]] = {}
        sizes: dict[ir.Value, int] = {}
        own = []
        for number, values in enumerate(needed):
            own.append(0)
            sizes.update(values)
            for value in values:
                blocks.setdefault(value, []).append(number)
        shared = Counter[tuple[int, ...]]()
        for value, numbers in blocks.items():
            if len(numbers) == 1:
                own[numbers[0]] += sizes[value]
            else:
                shared[tuple(numbers)] += sizes[value]
        self._own: Sequence[int] = list(accumulate(own, initial=0))  # prefix sums of bytes that a single block needs
        self._shared: Mapping[tuple[int, ...], int] = dict(shared)  # bytes by the blocks that need them

    def of(self, start: int, end: int) -> int:
        """Bytes of the values that the blocks from `start` to before `end` need."""
        shared = (
            size for blocks, size in self._shared.items() if bisect_left(blocks, start) < bisect_left(blocks, end)
        )
        return self._own[end] - self._own[start] + sum(shared)
