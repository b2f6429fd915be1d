"""What each rank loads and runs: the pieces of its graph, and the program that goes through them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import groupby

import onnx_ir as ir

from splitc.compiler.lowering.annotations import IR_VERSION, annotate
from splitc.compiler.lowering.exchange import main_pieces, part_name, slice_graph
from splitc.compiler.lowering.rank_graph import COLLECTIVE, rank_graph
from splitc.compiler.lowering.segments import Segment, cut_segments
from splitc.compiler.lowering.stages import Stage, stage_graph
from splitc.compiler.planning.plan import Plan, RankPlan
from splitc.compiler.sharding.partial import chosen_atoms
from splitc.compiler.sharding.row_split import RowSplit
from splitc.runtime.engines.kinds import has_collectives
from splitc.runtime.manifest import Part, Sizes
from splitc.runtime.steps import Receive, Reduce, Run, Send, Step


@dataclass(frozen=True)
class RankProgram:
    """One rank's pieces in the order in which they run, its steps, and what it takes from and gives to the caller.

    `keeps` are outputs that it has for its states while another rank gives them. `sizes` are, for each of its engines,
    those of the inputs, where the engines are built for them.
    """

    pieces: tuple[Segment, ...]
    steps: tuple[Step, ...]
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    parts: tuple[Part, ...]
    keeps: tuple[str, ...]
    sizes: tuple[dict[str, Sizes], ...] = ()

    @property
    def engines(self) -> list[ir.Graph]:
        """The pieces that compute something: each is an engine."""
        return [piece.graph for piece in self.pieces if piece.graph.outputs]


def rank_program(plan: Plan, number: int) -> RankProgram:
    """Build the graphs of one rank and its program."""
    rank = plan.ranks[number]
    if plan.rows is not None:
        return _help(plan.rows, number) if number else _lead(plan.rows, rank.stage)
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
        pieces = [Segment(graph, ())] if inside else cut_segments(graph, wanted, COLLECTIVE)
        if plan.analysis.graph.model.ir_version >= IR_VERSION:
            for piece in pieces:
                annotate(piece.graph, plan.tensor, rank.part, rank.group)
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
    group = [other for other, each in enumerate(plan.ranks) if each.group == rank.group]
    steps: list[Step] = [Receive(value.name or "", maker[value]) for value in rank.stage.receives]
    engines = 0
    for piece in pieces:
        if piece.graph.outputs:
            steps.append(Run(engines))
            engines += 1
        for operation, each in groupby(piece.joints, key=lambda node: node.attributes.get_string("reduce_op", "sum")):
            together = list(each)
            parts = [value.name or "" for node in together for value in node.inputs if value is not None]
            steps.append(Reduce(operation, parts, names(node.outputs[0] for node in together), group))
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


def _lead(split: RowSplit, stage: Stage) -> RankProgram:
    """The main rank of a row split: it runs the model, and its own columns of the products while others do theirs."""
    graphs: list[ir.Graph] = []
    steps: list[Step] = []

    def run(graph: ir.Graph) -> None:
        steps.append(Run(len(graphs)))
        graphs.append(graph)

    works = [split.work(number) for number in range(split.columns.ranks)]
    rounds = iter(zip(*works))
    for piece in main_pieces(split, stage):
        if piece.graph.outputs:
            run(piece.graph)
        if not piece.joints:
            continue
        own, *others = next(rounds)
        steps += [Send(name, rank) for rank, work in enumerate(others, 1) for name in names(work.takes)]
        if own.products:
            run(slice_graph(split, 0, own.products))
        steps += [Receive(part_name(each, rank), rank) for rank, work in enumerate(others, 1) for each in work.products]
    # What is fed and only sent on is no engine's input.
    taken = {value.name for graph in graphs for value in graph.inputs}
    taken |= {step.value for step in steps if isinstance(step, Send)}
    inputs = [name for name in names(stage.feeds) if name in taken]
    return _row_program(graphs, steps, inputs, names(stage.outputs))


def _help(split: RowSplit, number: int) -> RankProgram:
    """Another rank of a row split: it takes what it multiplies, and gives its columns."""
    graphs: list[ir.Graph] = []
    steps: list[Step] = []
    for work in split.work(number):
        if work.products:
            steps += [Receive(name, 0) for name in names(work.takes)]
            steps.append(Run(len(graphs)))
            graphs.append(slice_graph(split, number, work.products))
            steps += [Send(part_name(product, number), 0) for product in work.products]
    return _row_program(graphs, steps, [], [])


def _row_program(
    graphs: Iterable[ir.Graph], steps: Iterable[Step], inputs: Iterable[str], outputs: Iterable[str]
) -> RankProgram:
    pieces = tuple(Segment(graph, ()) for graph in graphs)
    return RankProgram(pieces, tuple(steps), tuple(inputs), tuple(outputs), (), ())


def names(values: Iterable[ir.Value]) -> list[str]:
    """The values' names."""
    return [value.name or "" for value in values]
