"""What the ranks of tensor mode run: their shards of the blocks, or the nodes of placed weights."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx_ir as ir

from splitc.compiler.analysis.facts import Analysis
from splitc.compiler.inference.shapes import BoundShapes
from splitc.compiler.lowering.communication import communicates
from splitc.compiler.lowering.programs import kept_states, names, stage_program
from splitc.compiler.lowering.rank_graph import rank_graph
from splitc.compiler.lowering.segments import Segment, cut_segments, engine_segments
from splitc.compiler.lowering.stage_graph import stage_graph
from splitc.compiler.lowering.transfers import Transfer, rank_transfers, to_shards, with_steps, with_transfers
from splitc.compiler.modes.detours import predict_detours, rank_seconds
from splitc.compiler.modes.pipeline import predict_pipeline
from splitc.compiler.modes.tensor_axes import TensorAxes
from splitc.compiler.operators import axes as ax
from splitc.compiler.planning.clock import Clock, Prediction
from splitc.compiler.planning.rank_plan import CutPlan, RankPlan
from splitc.compiler.planning.split import RankProgram
from splitc.compiler.sharding.report import AxisSplit, axis_splits
from splitc.compiler.sharding.sharded_model import ShardedModel
from splitc.runtime.hardware.profiles import HOST
from splitc.runtime.package.manifest import Part

# The bytes of a value's range: its minimum and maximum.
RANGE = 8


@dataclass(frozen=True)
class TensorSplit:
    """Each rank of a group runs every node of its stage on its shards, and the group all-reduces partial values.

    With placed weights, the blocks are one stage, and each device with placed weights is a further stage of one rank.
    `transfers` are those between these stages.
    """

    analysis: Analysis
    axes: TensorAxes
    sharded: ShardedModel
    transfers: tuple[Transfer, ...] = ()
    rewrites = True
    fixes_ranks = True
    whole = "whole on each rank"

    @property
    def probe_shapes(self) -> BoundShapes:
        return self.sharded.axis_map.bound

    @property
    def collectives(self) -> int:
        return self.sharded.sums.count

    def exchanged(self, cuts: Sequence[CutPlan]) -> list[int]:
        sums = self.sharded.sums
        return [*map(self.analysis.costs.value_bytes, sums.exchanged), *self._reduced_bytes()]

    def _reduced_bytes(self) -> Iterator[int]:
        """The bytes of each all-reduce of statistics: a range, or those of a node's rows, or of two paired norms."""
        sums = self.sharded.sums
        seconds = dict(sums.paired)
        for node in sums.reduced:
            if node not in seconds.values():
                both = [node, seconds[node]] if node in seconds else [node]
                yield max(RANGE, sum(map(self._statistics_bytes, both)))

    def _statistics_bytes(self, node: ir.Node) -> int:
        operation, data = self.sharded.axis_map.operations[node], node.inputs[0]
        assert data is not None
        rows = self.analysis.costs.value_bytes(data) // ax.size_of(operation.reduced)
        return rows * operation.statistics

    def more_sessions(self, rank: RankPlan, inside: bool) -> int:
        if not self._apart:
            return 0 if inside else self.collectives
        sums = self.collectives if self._has_shards(rank) else 0
        return sums + sum(own.inside and own.has(self._stage_of(rank)) for own in self.transfers)

    @property
    def _apart(self) -> bool:
        """Whether some weights are placed on other devices."""
        return bool(self.analysis.partition.placed)

    def _has_shards(self, rank: RankPlan) -> bool:
        """Whether the rank has shards of the blocks, rather than placed weights."""
        return rank.part < self.sharded.ranks

    def _stage_of(self, rank: RankPlan) -> int:
        """The number by which `transfers` refer to the rank's stage."""
        return max(0, rank.part - self.sharded.ranks + 1)

    def predict(self, ranks: Sequence[RankPlan], cuts: Sequence[CutPlan], clock: Clock) -> Prediction:
        stages = max(rank.group for rank in ranks) + 1
        if not self._apart:
            return predict_pipeline(
                ranks, cuts, clock, lambda members, n: self._stage_seconds(members, n, stages, clock)
            )
        first, apart = ranks[: self.sharded.ranks], ranks[self.sharded.ranks :]
        clock = replace(clock, operators=False)
        own = [self._stage_seconds(first, len(first), 1, clock), *(rank_seconds(rank, clock) for rank in apart)]
        return predict_detours([first, *([rank] for rank in apart)], self.transfers, clock, own)

    def _stage_seconds(self, members: Sequence[RankPlan], at_once: int, stages: int, clock: Clock) -> float:
        """The seconds of one of `stages` stages: of its slowest rank, plus its collectives."""
        first = members[0]
        slowest = max(
            clock.seconds(rank, rank.stage.nodes, at_once, partial(self.sharded.share, rank.part))
            for rank in clock.unlike(members, self.sharded.sizes)
        )
        slowest = slowest * max(1.0, clock.crowd(members)) + clock.feeding(first)
        count = self.collectives / stages
        sums = clock.sums(members, count, sum(self.exchanged(())) / stages)
        starts = 1 if clock.operators else count + 1
        return clock.meeting(slowest) + sums + starts * clock.start(first) + self._joining(clock) / stages

    def _joining(self, clock: Clock) -> float:
        """The seconds to slice sharded inputs and to join sharded outputs."""
        graph = self.analysis.graph.graph
        ends = (value for value in (*graph.inputs, *graph.outputs) if value.name not in clock.states)
        cut = [value for value in ends if self.sharded.shards(0).splits(self.sharded.axes(value))]
        size = sum(map(self.analysis.costs.value_bytes, cut))
        return len(cut) * HOST.part + clock.copying(clock.ranks[0], size)

    def program(self, ranks: Sequence[RankPlan], number: int, engine: str) -> RankProgram:
        rank, stage = ranks[number], ranks[number].stage
        outputs = self._given(rank)
        keeps = kept_states(self.analysis.states, rank, outputs)
        if self._apart:
            group = list(range(self.sharded.ranks))
            transfers = to_shards(self.transfers, len(group))
            segments = self._cut(rank, number, len(ranks), transfers, {*outputs, *keeps})
        else:
            group = [place for place, other in enumerate(ranks) if other.group == rank.group]
            transfers = rank_transfers(ranks, self.analysis.partition.position)
            graph, wanted = rank_graph(self.sharded, stage, rank.part), {*outputs, *keeps, *names(stage.sends)}
            segments = engine_segments(graph, wanted, engine, [other.device for other in ranks])
        program = stage_program(number, stage, segments, transfers, group, outputs)
        return replace(program, parts=tuple(self._parts(rank)), keeps=tuple(keeps))

    def _cut(
        self, rank: RankPlan, number: int, count: int, transfers: Sequence[Transfer], wanted: Collection[str]
    ) -> list[Segment]:
        """The segments of a rank if weights are placed: engines are cut at all-reduces and transfers."""
        inside = [own for own in transfers if own.inside]
        if self._has_shards(rank):
            graph = with_steps(rank_graph(self.sharded, rank.stage, rank.part), number, inside)
        else:
            graph = stage_graph(self.analysis.graph, rank.stage)
            graph = with_transfers(graph, number, inside, {peer: peer for peer in range(count)})
        sent = [own.value for own in transfers if own.source == number and not own.inside]
        joints = [node for node in graph if communicates(node)]
        return cut_segments(graph, {*wanted, *names(sent)}, joints, ordered=True)

    def _given(self, rank: RankPlan) -> list[str]:
        """The names of the outputs that the rank returns to the caller, or of which it returns its shard."""
        if not self._has_shards(rank):
            return names(rank.stage.outputs)
        return [value.name or "" for value in rank.stage.outputs if self.sharded.gives(rank.part, value)]

    def _parts(self, rank: RankPlan) -> list[Part]:
        """The manifest's entries for the rank's shards of inputs and outputs, without those that are whole."""
        if not self._has_shards(rank):
            return []
        shards = self.sharded.shards(rank.part)
        values = (*rank.stage.feeds, *rank.stage.outputs)
        parts = [shards.part(value.name or "", self.sharded.axes(value), value.shape) for value in values]
        return [part for part in parts if part is not None]

    def places(self, value: ir.Value, part: int) -> Mapping[int, npt.NDArray[np.int64]]:
        return self.sharded.shards(part).places(self.sharded.axes(value)) if part < self.sharded.ranks else {}

    def is_partial(self, value: ir.Value) -> bool:
        return value in self.sharded.sums.partial and value not in self.sharded.sums.summed

    def axis_splits(self) -> list[AxisSplit]:
        return axis_splits(self.analysis, self.sharded, self.axes.choice)

    def file_fields(self) -> Mapping[str, Any]:
        return {"islands": self.axes.islands}
