"""A rank's program: the steps that run its segments, and communicate before, between and after them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby

import onnx_ir as ir

from splitc.compiler.analysis.stages import Stage
from splitc.compiler.engine_graphs.session_weights import keep_outputs_exact, keep_weights_unfused
from splitc.compiler.lowering.communication import RECEIVE, SEND, kind_of
from splitc.compiler.lowering.rank_forms import COLLECTIVE
from splitc.compiler.lowering.segments import Segment
from splitc.compiler.lowering.transfers import Transfer
from splitc.compiler.nodes import inputs_of
from splitc.compiler.planning.rank_plan import RankPlan
from splitc.compiler.planning.split import RankProgram
from splitc.runtime.package.states import State
from splitc.runtime.package.steps import Receive, Reduce, Run, Send, Step


def rank_program(
    segments: Sequence[Segment],
    group: Sequence[int],
    feeds: Iterable[ir.Value],
    outputs: Iterable[str],
    before: Iterable[Step] = (),
    after: Iterable[Step] = (),
) -> RankProgram:
    """A rank's program: the steps `before`, its segments with the communication between them, and the steps `after`.

    `group` are the ranks of its all-reduces. It takes those `feeds` that its segments read or that it sends, and
    returns `outputs` to the caller.
    """
    steps = (*before, *_steps(segments, group), *after)
    taken = {value.name for segment in segments for value in segment.graph.inputs}
    taken |= {step.value for step in steps if isinstance(step, Send)}
    inputs = tuple(name for name in names(feeds) if name in taken)
    graphs = tuple(segment.graph for segment in segments if segment.graph.outputs)
    for graph in graphs:
        keep_weights_unfused(graph)
        keep_outputs_exact(graph)
    return RankProgram(graphs, steps, inputs, tuple(outputs), group=tuple(group))


def stage_program(
    number: int,
    stage: Stage,
    segments: Sequence[Segment],
    transfers: Sequence[Transfer],
    group: Sequence[int],
    outputs: Sequence[str],
) -> RankProgram:
    """The program of rank `number` of a pipeline: it receives from other stages, runs its segments, and sends.

    `transfers` are those of all ranks; those inside engines are in the segments already. For the other arguments see
    `rank_program`.
    """
    steps = [transfer for transfer in transfers if not transfer.inside]
    # Channels are first in, first out: both ranks have a channel's transfers in the same order.
    receives = [Receive(own.value.name or "", own.source) for own in steps if own.target == number]
    sends = [Send(own.value.name or "", own.target) for own in steps if own.source == number]
    return rank_program(segments, group, stage.feeds, outputs, receives, sends)


def kept_states(states: Iterable[State], rank: RankPlan, outputs: Iterable[str]) -> list[str]:
    """The state outputs that a rank keeps for its next request, while another rank returns them to the caller."""
    fed, made = set(names(rank.stage.feeds)), set(names(rank.stage.outputs)) - set(outputs)
    return [state.output for state in states if state.input in fed and state.output in made]


def _steps(segments: Sequence[Segment], group: Sequence[int]) -> Iterator[Step]:
    """Steps that run each segment, and the communication that follows it."""
    engines = 0
    for segment in segments:
        if segment.graph.outputs:
            yield Run(engines)
            engines += 1
        for form, joints in groupby(segment.joints, key=_form):
            yield from _exchange(form, list(joints), group)


def _form(joint: ir.Node) -> tuple[str, str]:
    """A joint's kind and operation. Consecutive all-reduces of one operation become one step."""
    return kind_of(joint), joint.attributes.get_string("reduce_op", "sum")


def _exchange(form: tuple[str, str], joints: Sequence[ir.Node], group: Sequence[int]) -> Iterator[Step]:
    kind, operation = form
    if kind == COLLECTIVE:
        partial = [value.name or "" for node in joints for value in inputs_of(node)]
        yield Reduce(operation, partial, names(node.outputs[0] for node in joints), list(group))
        return
    for node in joints:
        peer = node.attributes.get_int("peer", 0)
        if kind == SEND:
            assert node.inputs[0] is not None
            yield Send(node.inputs[0].name or "", peer)
        elif kind == RECEIVE:
            yield Receive(node.outputs[0].name or "", peer)


def names(values: Iterable[ir.Value]) -> list[str]:
    """The values' names."""
    return [value.name or "" for value in values]
