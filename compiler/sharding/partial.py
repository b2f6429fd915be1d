"""Finds where partial values are summed. A value is partial if each rank has summed over only its shard of an axis."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, field
from itertools import pairwise

import onnx_ir as ir

from splitc.compiler.analysis.facts import Analysis
from splitc.compiler.graphs.walks import producer_of, producers, reached
from splitc.compiler.nodes import inputs_of
from splitc.compiler.operators import axes as ax
from splitc.compiler.operators.axes import Axis, Factor
from splitc.compiler.operators.operation import Operation
from splitc.compiler.operators.registry import operator_of
from splitc.compiler.sharding.axis_map import AxisMap
from splitc.compiler.sharding.crossings import crossings
from splitc.runtime.package.fused import STEPS


@dataclass(frozen=True)
class Sums:
    """The collectives of a sharded model.

    - `partial`: maps each partial value to the atoms that it is partial over. A rank without units of them adds zero.
    - `summed`: the values that are all-reduced where they are computed, in the model's order. Other partial values are
      read as partial ones.
    - `added_on_one_rank`: maps a node with a partial result to the inputs that only one rank may add to it.
    - `reduced`: the nodes that need a statistic of all ranks' elements: a range, or a mean.
    - `drawn`: the nodes that draw random numbers. One rank draws, the others have zeros, and an all-reduce adds them.
    - `joined`: the values whose shards are joined at the border of an island.
    - `paired`: pairs of `reduced` nodes that share one all-reduce.
    """

    partial: Mapping[ir.Value, frozenset[Factor]]
    summed: tuple[ir.Value, ...]
    added_on_one_rank: Mapping[ir.Node, frozenset[int]]
    reduced: tuple[ir.Node, ...]
    drawn: tuple[ir.Node, ...] = ()
    joined: tuple[ir.Value, ...] = ()
    paired: tuple[tuple[ir.Node, ir.Node], ...] = ()

    @property
    def count(self) -> int:
        """The number of collectives in a run."""
        return len(self.summed) + len(self.reduced) - len(self.paired) + len(self.joined)

    @property
    def exchanged(self) -> tuple[ir.Value, ...]:
        """The values that collectives make whole."""
        return (*self.summed, *self.joined)


# For a model without partial values.
NO_SUMS = Sums({}, (), {}, ())


def find_sums(
    analysis: Analysis,
    axis_map: AxisMap,
    chosen: Collection[Factor],
    start: Iterable[ir.Node],
    drawn: Sequence[ir.Node] = (),
    early: Collection[ir.DataType] = (),
) -> Sums:
    """Trace partial values from the nodes that sum over a chosen atom to where they must be whole.

    - `start`: these nodes, and those that need a statistic of all elements of a chosen atom.
    - `drawn`: the nodes that draw random numbers.
    - `early`: the types of values that are all-reduced before elementwise nodes, rather than after them: on GPUs one
      fused kernel computes such nodes together with those that follow (engine_graphs/fused_rows.py).

    A partial value passes through nodes that are linear in it. It is summed as late as possible: before it meets a
    whole value (the residual), before several nodes read it, or before it grows. It may grow to meet another partial
    value, since one all-reduce serves both, and it may do either where it then shrinks.
    """
    borders, position = list(crossings(axis_map)), analysis.graph.position
    crossing = {border.value for border in borders if border.is_cut(chosen) or border.is_joined(chosen)}
    flow = _Flow(axis_map.operations, chosen, analysis.costs.value_bytes, crossing)
    queue = [(position[node], node) for node in start]
    heapq.heapify(queue)
    last = None
    while queue:
        _, node = heapq.heappop(queue)
        if node is not last:  # a node with several partial inputs is in the queue for each
            for reader in flow.visit(node):
                heapq.heappush(queue, (position[reader], reader))
        last = node
    used = (value for node in drawn for value in node.outputs if value.uses() or value.is_graph_output())
    flow.summed.update(dict.fromkeys(used))
    for value in [value for value in flow.summed if value.dtype in early]:
        flow.sum_early(value)
    in_order = sorted(flow.summed, key=lambda value: (position[producer_of(value)], value.index() or 0))
    joined = [border.value for border in borders if border.is_joined(chosen)]
    paired = _pairs(flow.reduced, producers([*in_order, *joined]), position)
    return Sums(
        flow.partial,
        tuple(in_order),
        flow.added_on_one_rank,
        tuple(flow.reduced),
        tuple(drawn),
        tuple(joined),
        tuple(paired),
    )


@dataclass
class _Flow:
    """The partial values so far, as nodes are visited in the model's order. For the results see `Sums`.

    `size` returns a value's bytes. `crossing` are the values that are sliced or joined at the border of an island, so
    they must not be partial.
    """

    operations: Mapping[ir.Node, Operation]
    chosen: Collection[Factor]
    size: Callable[[ir.Value], int]
    crossing: Collection[ir.Value]
    partial: dict[ir.Value, frozenset[Factor]] = field(default_factory=dict)
    summed: dict[ir.Value, None] = field(default_factory=dict)
    added_on_one_rank: dict[ir.Node, frozenset[int]] = field(default_factory=dict)
    reduced: list[ir.Node] = field(default_factory=list)

    def visit(self, node: ir.Node) -> list[ir.Node]:
        """Decide whether a node reads partial values, or they are summed before. Returns readers of its own ones."""
        operation = self.operations[node]
        incoming = {
            number: self.partial[value]
            for number, value in enumerate(node.inputs)
            if value is not None and value in self.partial and value not in self.summed
        }
        on_one_rank = self._passes(operation, incoming) if incoming else None
        if on_one_rank is None:
            self.summed.update({value: None for number in incoming if (value := node.inputs[number]) is not None})
            atoms = chosen_atoms([operation.contracted], self.chosen)
            on_one_rank = frozenset(number for number in operation.add_on_one_rank if operation.has(number))
        else:
            atoms = frozenset[Factor]().union(*incoming.values())
        if not atoms:
            if chosen_atoms([operation.reduced], self.chosen):
                self.reduced.append(node)
            return []
        self.added_on_one_rank[node] = on_one_rank
        self.partial.update(dict.fromkeys(node.outputs, atoms))
        passed = [value for value in node.outputs if _is_handed_on(value, node) and value not in self.crossing]
        self.summed.update({value: None for value in node.outputs if value not in passed})
        return [reader for value in passed for reader, _ in value.uses()]

    def sum_early(self, value: ir.Value) -> None:
        """Move a value's all-reduce before the elementwise nodes and views that compute it from one partial value."""
        node = producer_of(value)
        partial = {before for before in node.inputs if before in self.partial and before not in self.summed}
        if len(partial) != 1 or node.domain or not (node.op_type in STEPS or operator_of(node).is_view):
            return
        (before,) = partial
        if before is None or before.dtype != value.dtype or self.size(before) != self.size(value):
            return
        del self.summed[value], self.partial[value], self.added_on_one_rank[node]
        self.summed[before] = None
        self.sum_early(before)

    def _passes(self, operation: Operation, incoming: Mapping[int, frozenset[Factor]]) -> frozenset[int] | None:
        """The inputs that only one rank adds, if a node may read the `incoming` inputs as partial; else None."""
        node = operation.node
        output = node.outputs[0]
        sizes = [self.size(value) for number in incoming if (value := node.inputs[number]) is not None]
        # A Concat of partial values is as large as they are, though sizes that depend on data seem smaller.
        joins_all = node.op_type == "Concat" and len(incoming) == len(node.inputs)
        grows = self.size(output) > sum(sizes) and not joins_all
        if grows and not self._meets_partial(output) and not self._shrinks(output, sum(sizes)):
            return None
        if not self._stays_partial(operation):
            return None
        # Inputs that are partial over different atoms may be 0 on different ranks: only an addition can omit one.
        if len(set(incoming.values())) > 1 and not operation.add_on_one_rank:
            return None
        if _is_linear(operation, incoming.keys()):
            return frozenset()
        rest = _given(node) - incoming.keys()
        weights = rest <= frozenset(operation.weights)
        # A rank that omits an input must get a result of the same shape.
        axes = {len(operation.inputs[number] or ()) for number in incoming} | {len(operation.outputs[0] or ())}
        keeps = self.size(output) == max(sizes) and len(axes) == 1
        joins = keeps and bool(operation.add_on_one_rank) and rest <= operation.add_on_one_rank
        # A whole value, such as biases that are looked up for each row, is added if the sum then has fewer bytes.
        whole = self._meets_partial(output) or self._shrinks(output, sum(sizes) - 1)
        return rest if joins and (weights or whole) else None

    def _stays_partial(self, operation: Operation) -> bool:
        """Whether the result of a node that is linear in partial values is one partial value."""
        is_sharded = any(chosen_atoms(axes, self.chosen) for axes in operation.outputs)
        return not (is_sharded or chosen_atoms([operation.contracted], self.chosen) or len(operation.node.outputs) > 1)

    def _shrinks(self, value: ir.Value, most: int) -> bool:
        """Whether linear nodes that follow, each read by the next alone, leave at most so many bytes of a value."""
        node = producer_of(value)
        while self.size(value) > most:
            if not _is_handed_on(value, node) or value in self.crossing:
                return False
            node, number = next(iter(value.uses()))
            operation = self.operations[node]
            if not _is_linear(operation, {number}) or not self._stays_partial(operation):
                return False
            value = node.outputs[0]
        return True

    def _meets_partial(self, value: ir.Value) -> bool:
        """Whether the value's only reader adds a partial value, perhaps after a scale: one all-reduce serves both."""
        uses = value.uses()
        if len(uses) != 1 or value.is_graph_output():
            return False
        reader, number = next(iter(uses)).node, next(iter(uses)).idx
        others = [other for other in inputs_of(reader) if other is not value]
        if operator_of(reader).is_addition:
            return any(other in self.partial for other in others)
        scales = _is_linear(self.operations[reader], {number}) and all(o.is_initializer() for o in others)
        made = reader.outputs[0]
        return scales and self.size(made) == self.size(value) and self._meets_partial(made)


def _pairs(
    reduced: Sequence[ir.Node], others: Iterable[ir.Node], position: Mapping[ir.Node, int]
) -> list[tuple[ir.Node, ir.Node]]:
    """Pairs of norms without a collective between them, of which the second does not depend on the first.

    The norms of queries and of keys are such a pair. Their sums, one number a row, have the same shape.
    """
    paired: list[tuple[ir.Node, ir.Node]] = []
    norms = {node for node in reduced if operator_of(node).is_norm}
    for first, second in pairwise(sorted({*reduced, *others}, key=position.__getitem__)):
        is_free = {first, second} <= norms and not (paired and first in paired[-1])
        if is_free and _are_alike(first, second) and not _needs(second, first, position):
            paired.append((first, second))
    return paired


def _are_alike(first: ir.Node, second: ir.Node) -> bool:
    """Whether two norms are known to have the same number of rows."""
    one, other = (node.outputs[0].shape for node in (first, second))
    rows = [] if one is None else [size if isinstance(size, int) else size.value for size in one[:-1]]
    return None not in rows and one is not None and other is not None and one[:-1] == other[:-1]


def _needs(node: ir.Node, other: ir.Node, position: Mapping[ir.Node, int]) -> bool:
    """Whether a node depends on an earlier one."""
    first = position[other]
    above = reached([node], lambda node: [one for one in producers(node.inputs) if position.get(one, -1) >= first])
    return other in above


def _given(node: ir.Node) -> frozenset[int]:
    """The numbers of a node's inputs that are not left out."""
    return frozenset(number for number, value in enumerate(node.inputs) if value is not None)


def _is_linear(operation: Operation, numbers: Set[int]) -> bool:
    """Whether a node is linear in these inputs together."""
    given = _given(operation.node)
    return any(together & given == numbers for together in operation.linear)


def _is_handed_on(value: ir.Value, node: ir.Node) -> bool:
    """Whether exactly one other node of the same graph reads a value of this node."""
    readers = [reader for reader, _ in value.uses()]
    return len(readers) == 1 and not value.is_graph_output() and readers[0].graph is node.graph


def chosen_atoms(axes: Iterable[Axis] | None, chosen: Collection[Factor]) -> frozenset[Factor]:
    """The chosen atoms among the axes."""
    return frozenset(atom for atom in ax.atoms_of(axes) if atom in chosen)
