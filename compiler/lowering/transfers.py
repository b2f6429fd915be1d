"""The transfers between ranks that run whole nodes: which values go from which rank to which, when, and how.

All transfers have one order, that in which the model makes the values, and every rank takes part in its own in that
order: so no two ranks wait for each other. Ranks that need each other's values in one request are a team, whose
transfers take place while engines run: by operators inside these, or as steps between the segments that they are cut
into. Between teams, as between the stages of a pipeline, a rank receives before its engine runs, and sends after that.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import onnx_ir as ir

from splitc.compiler.analysis.stages import Stage
from splitc.compiler.frontend.origins import described, origin_of
from splitc.compiler.frontend.walks import producer_of, reached
from splitc.compiler.lowering.chained import ChainedGraph
from splitc.compiler.planning.rank_plan import RankPlan


@dataclass(frozen=True)
class Transfer:
    """A value that goes from the rank `source` to the rank `target`. `inside` a team: while their engines run."""

    value: ir.Value
    source: int
    target: int
    inside: bool = False

    def has(self, rank: int) -> bool:
        """Whether the rank takes part in it."""
        return rank in (self.source, self.target)


def rank_transfers(ranks: Sequence[RankPlan], position: Mapping[ir.Node, int]) -> list[Transfer]:
    """The transfers between ranks, in their order. A rank exchanges values with those of its `part` in other groups."""
    transfers = []
    for part in sorted({rank.part for rank in ranks}):
        numbers = [number for number, rank in enumerate(ranks) if rank.part == part]
        inside = find_transfers([ranks[number].stage for number in numbers], position)
        transfers += [replace(own, source=numbers[own.source], target=numbers[own.target]) for own in inside]
    return transfers


def find_transfers(stages: Sequence[Stage], position: Mapping[ir.Node, int]) -> list[Transfer]:
    """The transfers between ranks of these stages, one each, in their order. `position` is that of nodes in blocks."""
    senders = {value: number for number, stage in enumerate(stages) for value in stage.sends}
    pairs = [(value, number) for number, stage in enumerate(stages) for value in stage.receives]
    pairs.sort(key=lambda pair: (position[producer_of(pair[0])], pair[0].index() or 0, pair[1]))
    transfers = [Transfer(value, senders[value], target) for value, target in pairs]
    team = find_teams(len(stages), transfers)
    return [replace(own, inside=team[own.source] == team[own.target]) for own in transfers]


def find_teams(count: int, transfers: Sequence[Transfer]) -> dict[int, int]:
    """For each rank the first one of its team: the ranks whose values it needs, and which need its own."""
    leads = {rank: {transfer.target for transfer in transfers if transfer.source == rank} for rank in range(count)}
    after = {rank: set(reached(leads[rank], leads.__getitem__)) for rank in range(count)}
    return {rank: min({rank, *(other for other in after[rank] if rank in after[other])}) for rank in range(count)}


def with_transfers(graph: ir.Graph, rank: int, transfers: Sequence[Transfer], peers: Mapping[int, int]) -> ir.Graph:
    """A stage's graph with the transfers of its rank in place, which change it. `peers` are the numbers of the ranks.

    What the rank receives is no input any more.
    """
    for value in (value for node in graph for value in node.outputs):  # values between engines need types
        value.type = value.type or described(value).type
    own = [transfer for transfer in transfers if transfer.has(rank)]
    values = {origin_of(value): value for node in graph for value in node.outputs}
    coming = {transfer.value for transfer in own if transfer.target == rank}
    placeholders = {origin_of(value): value for value in graph.inputs if origin_of(value) in coming}
    for value in placeholders.values():
        graph.inputs.remove(value)
    chained = ChainedGraph(graph)
    for transfer in own:
        if transfer.source == rank:
            chained.send(values[transfer.value], peers[transfer.target])
        else:
            value = chained.receive(transfer.value.name or "", transfer.value, peers[transfer.source])
            placeholders[transfer.value].replace_all_uses_with(value)
    return chained.finish()
