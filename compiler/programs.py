"""What each rank loads and runs: the pieces of its graph, and the program that goes through them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import groupby

import onnx_ir as ir

from splitc.compiler.plan import Plan, RankPlan
from splitc.compiler.split.annotate import IR_VERSION, annotate
from splitc.compiler.split.layer import stage_graph
from splitc.compiler.split.partial import chosen_atoms
from splitc.compiler.split.rank_graph import rank_graph
from splitc.compiler.split.segments import Segment, cut_segments
from splitc.runtime.engines.kinds import has_collectives
from splitc.runtime.manifest import Part
from splitc.runtime.program import Receive, Reduce, Run, Send, Step


@dataclass(frozen=True)
class RankProgram:
    """One rank's pieces in the order in which they run, its steps, and what it takes from and gives to the caller.

    `keeps` are outputs that it has for its states while another rank gives them.
    """

    pieces: tuple[Segment, ...]
    steps: tuple[Step, ...]
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    parts: tuple[Part, ...]
    keeps: tuple[str, ...]


def rank_program(plan: Plan, number: int) -> RankProgram:
    """Build the graphs of one rank and its program."""
    rank = plan.ranks[number]
    parts = _parts(plan, rank)
    outputs = [value.name or "" for value in rank.stage.outputs if _gives(plan, rank, value)]
    fed, made = set(names(rank.stage.feeds)), set(names(rank.stage.outputs)) - set(outputs)
    keeps = [state.output for state in plan.analysis.states if state.input in fed and state.output in made]
    if plan.tensor is None:
        pieces = [Segment(stage_graph(plan.analysis.graph, rank.stage), ())]
    else:
        graph = rank_graph(plan.tensor, rank.stage, rank.part)
        wanted = {*outputs, *keeps, *names(rank.stage.sends)}
        inside = has_collectives(plan.engine)
        pieces = [Segment(graph, ())] if inside else cut_segments(graph, wanted)
        if plan.analysis.graph.model.ir_version >= IR_VERSION:
            for piece in pieces:
                annotate(piece.graph, plan.tensor, rank.part, plan.stages.index(rank.stage))
    taken = {value.name for piece in pieces for value in piece.graph.inputs}
    inputs = [name for name in names(rank.stage.feeds) if name in taken]
    steps = _steps(plan, number, pieces)
    return RankProgram(tuple(pieces), tuple(steps), tuple(inputs), tuple(outputs), tuple(parts), tuple(keeps))


def _steps(plan: Plan, number: int, pieces: Sequence[Segment]) -> list[Step]:
    """Receive what earlier stages made, run the pieces with the sums between them, send what later stages need.

    In a group of ranks each exchanges values with the one at its own place in other groups.
    """
    rank = plan.ranks[number]
    peers = [other for other, each in enumerate(plan.ranks) if each.part == rank.part]
    maker = {value: other for other in peers for value in plan.ranks[other].stage.sends}
    group = [other for other, each in enumerate(plan.ranks) if each.stage is rank.stage]
    steps: list[Step] = [Receive(value.name or "", maker[value]) for value in rank.stage.receives]
    engines = 0
    for piece in pieces:
        if piece.graph.outputs:
            steps.append(Run(engines))
            engines += 1
        for operation, each in groupby(piece.collectives, key=lambda collective: collective.operation):
            together = list(each)
            parts, wholes = [one.part for one in together], [one.whole for one in together]
            steps.append(Reduce(operation, parts, wholes, group))
    # A channel keeps its order, so a rank must send in the order in which the other receives.
    steps += [
        Send(value.name or "", target)
        for target in peers
        for value in plan.ranks[target].stage.receives
        if maker[value] == number
    ]
    return steps


def _gives(plan: Plan, rank: RankPlan, value: ir.Value) -> bool:
    """Whether the rank hands its part of an output to the caller: of one that all have, the first rank does."""
    split = plan.tensor
    atoms = chosen_atoms(split.axes(value), split.ranges) if split is not None else frozenset()
    if split is None or not atoms:
        return rank.part == 0
    return all(split.ranges[atom][rank.part].counts for atom in atoms)


def _parts(plan: Plan, rank: RankPlan) -> list[Part]:
    """The inputs and outputs of which the rank has a part only."""
    if plan.tensor is None:
        return []
    shards = plan.tensor.shards(rank.part)
    values = (*rank.stage.feeds, *rank.stage.outputs)
    found = [shards.part(value.name or "", plan.tensor.axes(value), value.shape) for value in values]
    return [part for part in found if part is not None]


def names(values: Iterable[ir.Value]) -> list[str]:
    """The values' names."""
    return [value.name or "" for value in values]
