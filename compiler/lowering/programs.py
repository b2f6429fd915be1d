"""A rank's program in a pipeline: it receives, runs segments, reduces between them, and sends."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import groupby

import onnx_ir as ir

from splitc.compiler.lowering.fusions import keep_unfused
from splitc.compiler.lowering.segments import Segment
from splitc.compiler.planning.rank_plan import RankPlan
from splitc.compiler.planning.split import RankProgram
from splitc.runtime.manifest import Part, State
from splitc.runtime.steps import Receive, Reduce, Run, Send, Step


def stage_program(
    ranks: Sequence[RankPlan],
    number: int,
    segments: Sequence[Segment],
    outputs: Sequence[str],
    keeps: Sequence[str] = (),
    parts: Sequence[Part] = (),
) -> RankProgram:
    """The program of rank `number`, which runs the segments of its stage's graph and gives `outputs` to the caller."""
    taken = {value.name for segment in segments for value in segment.graph.inputs}
    inputs = [name for name in names(ranks[number].stage.feeds) if name in taken]
    graphs = tuple(keep_unfused(segment.graph) for segment in segments if segment.graph.outputs)
    steps = tuple(_steps(ranks, number, segments))
    return RankProgram(graphs, steps, tuple(inputs), tuple(outputs), tuple(parts), tuple(keeps))


def kept_states(states: Iterable[State], rank: RankPlan, outputs: Iterable[str]) -> list[str]:
    """The outputs that a rank keeps for its states while another rank gives them to the caller."""
    fed, made = set(names(rank.stage.feeds)), set(names(rank.stage.outputs)) - set(outputs)
    return [state.output for state in states if state.input in fed and state.output in made]


def _steps(ranks: Sequence[RankPlan], number: int, segments: Sequence[Segment]) -> list[Step]:
    """Receive from earlier stages, run the segments with reductions between them, send to later stages.

    A rank exchanges values with the rank of the same `part` in each other group.
    """
    rank = ranks[number]
    peers = [other for other, each in enumerate(ranks) if each.part == rank.part]
    maker = {value: other for other in peers for value in ranks[other].stage.sends}
    group = [other for other, each in enumerate(ranks) if each.group == rank.group]
    steps: list[Step] = [Receive(value.name or "", maker[value]) for value in rank.stage.receives]
    engines = 0
    for segment in segments:
        if segment.graph.outputs:
            steps.append(Run(engines))
            engines += 1
        for operation, each in groupby(segment.joints, key=lambda node: node.attributes.get_string("reduce_op", "sum")):
            together = list(each)
            partial = [value.name or "" for node in together for value in node.inputs if value is not None]
            steps.append(Reduce(operation, partial, names(node.outputs[0] for node in together), group))
    # A channel is first in, first out: a rank must send in the order in which the other one receives.
    steps += [
        Send(value.name or "", target)
        for target in peers
        for value in ranks[target].stage.receives
        if maker[value] == number
    ]
    return steps


def names(values: Iterable[ir.Value]) -> list[str]:
    """The values' names."""
    return [value.name or "" for value in values]
