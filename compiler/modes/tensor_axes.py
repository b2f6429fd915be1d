"""Chooses the axes that tensor mode shards, and the islands whose collectives cost less than they save."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass

import onnx_ir as ir

from splitc.compiler.analysis.facts import Analysis
from splitc.compiler.operators import axes as ax
from splitc.compiler.operators.axes import Factor
from splitc.compiler.planning.clock import Pace
from splitc.compiler.remembered import remembered
from splitc.compiler.sharding.axis_map import AxisMap, Island, find_axes, probe_sizes
from splitc.compiler.sharding.candidates import Candidate, Candidates, find_candidates
from splitc.compiler.sharding.choice import Choice, choose
from splitc.compiler.sharding.crossings import crossings
from splitc.compiler.sharding.islands import find_islands
from splitc.compiler.trials.trial import find_broken
from splitc.runtime.hardware.profiles import Link

# Returns whether the islands that share a candidate axis are worth its collectives.
_Worth = Callable[[Collection[Island], Candidate], bool]


@dataclass(frozen=True)
class TensorAxes:
    """The axes of a model, the choice of those to shard, and the nodes whose rules did not hold when tried."""

    axis_map: AxisMap
    choice: Choice
    broken: Mapping[ir.Node, str]

    @property
    def islands(self) -> list[str]:
        """The names of the islands' outputs, in the model's order."""
        return [island.node.outputs[0].name or "" for island in self.axis_map.islands]


def fast_axes(analysis: Analysis, count: int, pace: Pace, collective: Link) -> TensorAxes:
    """The axes to shard over `count` ranks, with the islands that save more seconds than their collectives take.

    `pace` is that of each rank, and `collective` the time of a collective.
    """

    def is_worth(islands: Collection[Island], candidate: Candidate) -> bool:
        spent = candidate.collectives * collective.latency + candidate.exchanged * collective.per_byte
        return spent < pace.seconds(analysis.costs, [island.node for island in islands]) * (1 - 1 / count)

    return _with_islands(analysis, count, is_worth)


def small_axes(analysis: Analysis, count: int) -> TensorAxes:
    """The axes to shard over `count` ranks, with all islands: most weights are sharded, whatever time that takes."""
    return _with_islands(analysis, count, lambda islands, candidate: True)


def named_axes(analysis: Analysis, count: int, names: Collection[str]) -> TensorAxes:
    """The axes to shard over `count` ranks, with the islands whose outputs have these names."""

    def is_worth(islands: Collection[Island], candidate: Candidate) -> bool:
        return all(island.node.outputs[0].name in names for island in islands)

    return _with_islands(analysis, count, is_worth)


def _with_islands(analysis: Analysis, count: int, is_worth: _Worth) -> TensorAxes:
    plain = settle(analysis, count, ())
    islands = find_islands(analysis, plain.axis_map, plain.choice)
    apart = _apart(analysis)
    possible = tuple(island for island in islands if island.node not in apart)
    if not possible:
        return plain
    shared = _best_candidates(*_candidates(analysis, frozenset(plain.broken.items()), possible))
    worth = {island for islands, candidate in shared if is_worth(islands, candidate) for island in islands}
    if not worth:
        return plain
    axes = settle(analysis, count, tuple(island for island in possible if island in worth))
    return axes if _covered(axes) > _covered(plain) else plain


def _apart(analysis: Analysis) -> dict[ir.Node, str]:
    """The nodes with placed weights, on other devices than the blocks, each with the reason why its axes are whole."""
    placed = analysis.partition.placed
    return {node: f"it is on {own.device}" for own in placed for block in own.blocks for node in block.nodes}


def _best_candidates(axis_map: AxisMap, candidates: Candidates) -> list[tuple[list[Island], Candidate]]:
    """For each island, the candidate with the highest gain among its own axes. Islands of one weight may share it."""
    owners = defaultdict[Factor, set[Island]](set)
    islands = {island.node: island for island in axis_map.islands}
    for crossing in crossings(axis_map):
        for side in crossing.sides:
            for atom in ax.atoms(side.after if crossing.place is not None else side.before):
                owners[atom].add(islands[crossing.node])
    shared, left = list[tuple[list[Island], Candidate]](), list(axis_map.islands)
    for candidate in candidates.by_gain:
        if own := [island for island in left if island in owners[candidate.atom]]:
            shared.append((own, candidate))
            left = [island for island in left if island not in owners[candidate.atom]]
    return shared


def _covered(axes: TensorAxes) -> int:
    """The bytes of the weights that are sharded."""
    chosen = frozenset(axes.choice.chosen)
    sharded: dict[ir.Value, int] = {}
    for candidate in axes.choice.candidates:
        if candidate.atom in chosen:
            for weight, size in candidate.weights.items():
                sharded[weight] = max(size, sharded.get(weight, 0))
    return sum(sharded.values())


@remembered
def settle(analysis: Analysis, count: int, islands: tuple[Island, ...]) -> TensorAxes:
    """The axes to shard over `count` ranks.

    If a node's rule does not hold when tried, the node is made opaque, and the axes are chosen again. Nodes with placed
    weights read and return whole values.
    """
    opaque = _apart(analysis)
    while True:
        axis_map, candidates = _candidates(analysis, frozenset(opaque.items()), islands)
        choice = choose(analysis, axis_map, candidates, count)
        broken = find_broken(analysis, axis_map, choice)
        if not broken:
            return TensorAxes(axis_map, choice, opaque)
        opaque.update(broken)


@remembered
def _candidates(
    analysis: Analysis, opaque: frozenset[tuple[ir.Node, str]], islands: tuple[Island, ...]
) -> tuple[AxisMap, Candidates]:
    """The axes and candidates with these opaque nodes and islands, which do not depend on the number of ranks."""
    axis_map = find_axes(analysis.graph, probe_sizes(analysis), dict(opaque), islands, states=analysis.states)
    return axis_map, find_candidates(analysis, axis_map)
