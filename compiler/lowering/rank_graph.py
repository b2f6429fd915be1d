"""The graph of one rank in tensor parallelism: shards of weights, corrected sizes, and a node for each collective."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

import numpy as np
import onnx_ir as ir

from splitc.compiler.analysis.stages import Stage
from splitc.compiler.graphs.editor import Editor
from splitc.compiler.graphs.optional import mark_part
from splitc.compiler.graphs.origins import note_sizes, noted_sizes, origin_of, restore_types
from splitc.compiler.graphs.reads import node_reads
from splitc.compiler.graphs.unused import remove_unused, remove_unused_inputs
from splitc.compiler.graphs.walks import ancestors, producer_of, producers
from splitc.compiler.lowering import borders
from splitc.compiler.lowering import rank_forms as forms
from splitc.compiler.lowering.communication import communicates
from splitc.compiler.lowering.size_rewriter import SizeRewriter
from splitc.compiler.lowering.stage_graph import stage_graph
from splitc.compiler.nodes import settings_of, unused_name
from splitc.compiler.operators import axes as ax
from splitc.compiler.operators.axes import Axis
from splitc.compiler.operators.operation import Axes, Operation
from splitc.compiler.sharding.crossings import Crossing, crossings
from splitc.compiler.sharding.partial import chosen_atoms
from splitc.compiler.sharding.sharded_model import ShardedModel


def rank_graph(split: ShardedModel, stage: Stage, rank: int) -> ir.Graph:
    """The stage's graph as one rank runs it.

    Values keep the model's names. The result of an all-reduce has the name of the whole value.

    A rank drops inputs of a partial sum that another rank adds. If nothing else on this rank reads an earlier
    all-reduce, it would be removed, and the other ranks would wait in it. Then the graph is built again: inputs that
    depend on an all-reduce are not dropped, but replaced by zeros computed from them.
    """
    graph = _RankGraph(split, stage, rank).build()
    count = _collectives(graph)
    remove_unused(graph)
    if _collectives(graph) < count:
        graph = _RankGraph(split, stage, rank, waits=True).build()
        remove_unused(graph)
    remove_unused_inputs(graph)
    return graph


class _RankGraph:
    """One rank's graph under construction. With `waits` it keeps all-reduces whose results it does not need."""

    def __init__(self, split: ShardedModel, stage: Stage, rank: int, waits: bool = False) -> None:
        self._waits = waits
        self._split = split
        self._rank = rank
        self._shards = split.shards(rank)
        self._graph = stage_graph(split.graph, stage)
        self._editor = forms.RankEditor(self._graph, self._shards, split.ranks)
        self._sizes = SizeRewriter(self._editor, self._axes, self._length)
        self._summed = frozenset(split.sums.summed)
        self._reduced = frozenset(split.sums.reduced)
        self._drawn = frozenset(split.sums.drawn)
        self._sums: dict[ir.Node, ir.Value] = {}  # by the model's norm: its all-reduced sums
        self._crossings: dict[ir.Node, list[Crossing]] = defaultdict(list)
        for crossing in crossings(split.axis_map):
            self._crossings[crossing.node].append(crossing)
        restore_types(self._graph)

    def build(self) -> ir.Graph:
        """The graph, including nodes without readers."""
        for node in list(self._graph):
            if (origin := origin_of(node)) is not None:  # None for nodes that compute borrowed sizes
                self._rewrite(node, origin)
        for first, second in self._split.sums.paired:
            if first in self._sums and second in self._sums:
                counts = [self._split.axis_map.operations[norm].statistics for norm in (first, second)]
                _join_sums(self._editor, self._sums[first], self._sums[second], counts)
        self._globalize_outputs()
        for value in [*self._graph.inputs, *(value for node in self._graph for value in node.outputs)]:
            self._fit_shape(value)
        return self._graph

    def _rewrite(self, node: ir.Node, origin: ir.Node) -> None:
        operation = self._split.axis_map.operations[origin]
        for crossing in self._crossings.get(origin, ()):
            if crossing.place is not None:
                borders.enter(self._editor, node, crossing)
        self._cut_weights(node, operation)
        self._sizes.rewrite(node, operation)
        forms.mask_unowned(self._editor, node, operation)
        forms.keep_directions(self._editor, node, operation)
        if operation.splits_evenly:
            forms.set_split_lengths(self._editor, node, operation)
        if origin in self._reduced:  # even if this rank has all of the value, since other ranks do not
            whole = forms.reduce_statistics(self._editor, node, operation)
            if whole is not None:
                self._sums[origin] = whole
            return
        if origin in self._drawn:
            self._draw_once(node, origin)
            return
        result = node.outputs[0]
        if operation.is_lookup and self._shards.is_split(operation.contracted):
            result = forms.look_up(self._editor, node, operation)
        if operation.averages and self._shards.is_split(operation.contracted):
            result = forms.scale_mean(self._editor, node, operation)
        if origin.outputs[0] in self._split.sums.partial:
            result = self._drop_added(node, origin, operation) or result
            if not self._split.owns(self._rank, operation):
                result = forms.uncounted(self._editor, result)
        if origin.outputs[0] in self._summed:
            result = forms.sum_over_ranks(self._editor, result)
        for crossing in self._crossings.get(origin, ()):
            if crossing.place is None:
                borders.leave(self._editor, result, crossing)

    def _draw_once(self, node: ir.Node, origin: ir.Node) -> None:
        """Give all ranks the random numbers of rank 0."""
        for value, made in zip(list(node.outputs), origin.outputs, strict=True):
            if made in self._summed:
                forms.draw_once(self._editor, value, self._rank == 0)

    def _axes(self, value: ir.Value) -> Axes:
        origin = origin_of(value)
        return None if origin is None else self._split.axes(origin)

    def _length(self, value: ir.Value) -> int:
        """The number of sizes in a shape vector."""
        if value.is_initializer() and value.const_value is not None:
            return value.const_value.size
        axes = self._axes(value)
        return ax.size_of(axes[0]) if axes else 1

    def _cut_weights(self, node: ir.Node, operation: Operation) -> None:
        """Replace each weight that a node reads by the rank's shard. Equal shards are one initializer."""
        for number, (value, axes) in enumerate(zip(node.inputs, operation.inputs, strict=True)):
            if value is None or axes is None or not value.is_initializer() or not self._shards.splits(axes):
                continue
            assert value.const_value is not None
            # Copies of an inlined function have one tensor for a constant in it.
            key = (str(id(value.const_value)), self._shards.key(axes))
            shard = self._editor.find(key)
            if shard is None:
                name = unused_name(f"{value.name}/rank{self._rank}", self._graph.initializers)
                shard = self._editor.add(key, self._shards.weight(value.const_value, axes, name))
                mark_part(shard, value, self._shards.places(axes))
            node.replace_input_with(number, shard)

    def _drop_added(self, node: ir.Node, origin: ir.Node, operation: Operation) -> ir.Value | None:
        """Drop the inputs of a partial sum that another rank adds. Returns the new result; None if none was dropped."""
        added = self._split.sums.added_on_one_rank.get(origin, frozenset())
        if not added or self._split.adds(self._rank, operation):
            return None
        if self._waits:
            summed = {number for number in added if _depends_on_sum(node.inputs[number])}
            for number in summed:
                forms.zero_added(self._editor, node, number)
            if not (added := added - summed):
                return None
        contracts = bool(chosen_atoms([operation.contracted], self._split.ranges))
        return forms.drop_added(self._editor, node, added, contracts)

    def _globalize_outputs(self) -> None:
        """Replace sizes of shards by those of whole values in outputs that are shape vectors."""
        for number, value in enumerate(self._graph.outputs):
            if value in self._sizes.read:
                self._graph.outputs[number] = self._sizes.globalize_output(value)

    def _fit_shape(self, value: ir.Value) -> None:
        """Replace a value's sizes along sharded axes by the rank's own. Symbols there become unknown.

        ONNX Runtime lets values whose symbols are equal share a buffer, but shards of equal axes may differ in size.
        """
        axes = self._axes(value)
        if axes is not None and self._shards.splits(axes):
            value.shape = self._own_shape(value.shape, axes)
            note_sizes(value, self._own_shape(noted_sizes(value), axes))

    def _own_shape(self, shape: ir.Shape | None, axes: Sequence[Axis]) -> ir.Shape | None:
        if shape is None:
            return None
        return ir.Shape([self._own_size(size, axis) for size, axis in zip(shape, axes, strict=True)])

    def _own_size(self, size: int | ir.SymbolicDim, axis: Axis) -> int | ir.SymbolicDim | None:
        if not self._shards.is_split(axis):
            return size
        return self._shards.size(axis) if size == ax.size_of(axis) else None


def _collectives(graph: ir.Graph) -> int:
    """The number of a graph's collectives."""
    return sum(map(communicates, graph))


def _depends_on_sum(value: ir.Value | None) -> bool:
    """Whether the value is computed from a collective's result."""
    return any(map(communicates, ancestors(producers([value]), node_reads)))


def _join_sums(editor: Editor, one: ir.Value, other: ir.Value, counts: Sequence[int]) -> None:
    """Replace the all-reduces of two norms' sums [..., 1 or 2] by one: such small all-reduces cost their latency.

    `other` is computed later than `one`. `counts` are their numbers of sums for each row. Nodes in between that `other`
    needs move before both.
    """
    graph, first, second = editor.graph, producer_of(one), producer_of(other)
    nodes, needed = list(graph), ancestors([second], node_reads)
    for node in nodes[nodes.index(first) + 1 : nodes.index(second)]:
        if node in needed:
            graph.remove(node)
            graph.insert_before(first, node)
    partial = editor.before(first, "Concat", first.inputs[0], second.inputs[0], axis=-1)
    whole = editor.before(first, first.op_type, partial, **settings_of(first))
    partial.type = whole.type = one.type
    # These names must be the same on all ranks.
    partial.name, whole.name = (f"{one.name}+{other.name}{end}" for end in ("/part", ""))
    for old, own in zip((one, other), np.split(np.arange(sum(counts)), counts[:1]), strict=True):
        new = editor.before(first, "Gather", whole, editor.constant(own), axis=-1)
        new.type, new.shape = old.type, old.shape
        old.replace_all_uses_with(new)
    graph.remove([first, second], safe=True)
