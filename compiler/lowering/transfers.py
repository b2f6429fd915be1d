"""Transfers between stages: which values go from which rank to which, in which order, and when.

All ranks run their transfers in one order, in which the model computes the values, so no two ranks wait for each other.
Ranks that need each other's values within a request are a team. A team's transfers run while its engines run: by
operators inside them, or as steps between segments. Between teams, as between the stages of a pipeline, a rank receives
before its engine runs and sends after it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import onnx_ir as ir

from splitc.compiler.analysis.stages import Stage
from splitc.compiler.graphs.origins import origin_of, restore_types
from splitc.compiler.graphs.walks import producer_of, reached
from splitc.compiler.lowering.communication import DOMAIN, RECEIVE, SEND, ChainedGraph
from splitc.compiler.lowering.open_shapes import open_shape
from splitc.compiler.planning.rank_plan import RankPlan


@dataclass(frozen=True)
class Transfer:
    """A value that rank `source` sends to rank `target`. `inside`: both are a team, so it is sent while engines run."""

    value: ir.Value
    source: int
    target: int
    inside: bool = False

    def has(self, rank: int) -> bool:
        """Whether the rank sends or receives it."""
        return rank in (self.source, self.target)


def rank_transfers(ranks: Sequence[RankPlan], position: Mapping[ir.Node, int]) -> list[Transfer]:
    """The transfers between ranks, in order. Rank `part` of a stage communicates with the same `part` of others."""
    transfers = []
    for part in sorted({rank.part for rank in ranks}):
        numbers = [number for number, rank in enumerate(ranks) if rank.part == part]
        inside = find_transfers([ranks[number].stage for number in numbers], position)
        transfers += [replace(own, source=numbers[own.source], target=numbers[own.target]) for own in inside]
    return transfers


def find_transfers(stages: Sequence[Stage], position: Mapping[ir.Node, int]) -> list[Transfer]:
    """The transfers between stages of one rank each, in order. `position` numbers the model's nodes."""
    senders = {value: number for number, stage in enumerate(stages) for value in stage.sends}
    pairs = [(value, number) for number, stage in enumerate(stages) for value in stage.receives]
    pairs.sort(key=lambda pair: (position[producer_of(pair[0])], pair[0].index() or 0, pair[1]))
    transfers = [Transfer(value, senders[value], target) for value, target in pairs]
    team = find_teams(len(stages), transfers)
    return [replace(own, inside=team[own.source] == team[own.target]) for own in transfers]


def find_teams(count: int, transfers: Sequence[Transfer]) -> dict[int, int]:
    """By rank, the first rank of its team: all ranks whose values it needs and that need its own, directly or not."""
    leads = {rank: {transfer.target for transfer in transfers if transfer.source == rank} for rank in range(count)}
    after = {rank: set(reached(leads[rank], leads.__getitem__)) for rank in range(count)}
    return {rank: min({rank, *(other for other in after[rank] if rank in after[other])}) for rank in range(count)}


def to_shards(transfers: Sequence[Transfer], parts: int) -> list[Transfer]:
    """The transfers if the first stage is sharded over `parts` ranks, and every other stage has one rank.

    Values that cross are whole on all ranks of the first stage: the first of them sends, and all receive.
    """
    first, others = range(parts), parts - 1
    return [
        replace(own, source=own.source and own.source + others, target=target)
        for own in transfers
        for target in ([own.target + others] if own.target else first)
    ]


def with_transfers(graph: ir.Graph, rank: int, transfers: Sequence[Transfer], peers: Mapping[int, int]) -> ir.Graph:
    """Insert a rank's transfers into its stage's graph, in place. Received values are no inputs afterwards.

    `peers` are the numbers by which the operators know the ranks.
    """
    restore_types(graph)
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


def with_steps(graph: ir.Graph, rank: int, transfers: Sequence[Transfer]) -> ir.Graph:
    """Insert a rank's transfers among the all-reduces of its graph, in place, for engines that are cut at both.

    `transfers` are those of all ranks. They and the graph's nodes are in the model's order. A receive is inserted after
    the node of the last value that any rank sends before it, so that ranks with shards of the same nodes have
    all-reduces and transfers in one order.
    """
    number = {node: place for place, node in enumerate(graph)}
    values = {value.name: value for node in graph for value in node.outputs}
    coming = {value.name: value for value in graph.inputs}
    before, last = graph[0], None  # inserted before the first node, or after the last one that it must follow
    for transfer in transfers:
        name = transfer.value.name or ""
        if name in values:
            maker = producer_of(values[name])
            last = maker if last is None or number[maker] > number[last] else last
        if not transfer.has(rank):
            continue
        if transfer.source == rank:
            node = ir.node(SEND, [values[name]], {"peer": transfer.target}, domain=DOMAIN, name=f"{name}/{SEND}")
        else:
            node = ir.node(RECEIVE, [], {"peer": transfer.source}, domain=DOMAIN, name=f"{name}/{RECEIVE}")
            if (placeholder := coming.get(name)) is not None:  # None where only other ranks read it
                graph.inputs.remove(placeholder)
                placeholder.replace_all_uses_with(node.outputs[0])
            node.outputs[0].name, node.outputs[0].shape = name, open_shape(transfer.value)
        node.outputs[0].type = transfer.value.type
        if last is None:
            graph.insert_before(before, node)
        else:
            graph.insert_after(last, node)
            number[node], last = number[last], node
    return graph
