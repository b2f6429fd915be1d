"""The programs of row mode: the main rank runs the model, and the other ranks only multiply."""

from __future__ import annotations

from collections.abc import Iterable

import onnx_ir as ir

from splitc.compiler.analysis.stages import Stage
from splitc.compiler.lowering.fusions import keep_unfused
from splitc.compiler.lowering.programs import names
from splitc.compiler.lowering.row_engines import helper_graph, main_graph
from splitc.compiler.lowering.row_graphs import main_segments, slice_graph, slice_name
from splitc.compiler.planning.split import RankProgram
from splitc.compiler.sharding.slices import SlicedProducts
from splitc.runtime.steps import Receive, Run, Send, Step


def row_program(sliced: SlicedProducts, stage: Stage, number: int, inside: bool) -> RankProgram:
    """The program of a rank. `inside`: what ranks send and receive is inside their engines, of which each has one.

    `stage` is that of the main rank, which is number 0.
    """
    if not inside:
        return _helper_program(sliced, number) if number else _main_program(sliced, stage)
    graph = helper_graph(sliced, number) if number else main_graph(sliced, stage)
    outputs = [] if number else names(stage.outputs)
    inputs = [] if number else [name for name in names(stage.feeds) if name in names(graph.inputs)]
    return _program([graph], [Run(0)], inputs, outputs)


def _main_program(sliced: SlicedProducts, stage: Stage) -> RankProgram:
    """The main rank runs the model, and its own columns of the products while the other ranks compute theirs."""
    graphs: list[ir.Graph] = []
    steps: list[Step] = []

    def run(graph: ir.Graph) -> None:
        steps.append(Run(len(graphs)))
        graphs.append(graph)

    works = [sliced.work(number) for number in range(sliced.columns.ranks)]
    rounds = iter(zip(*works, strict=True))
    for segment in main_segments(sliced, stage):
        if segment.graph.outputs:
            run(segment.graph)
        if not segment.joints:
            continue
        own, *others = next(rounds)
        steps += [Send(name, rank) for rank, work in enumerate(others, 1) for name in names(work.takes)]
        if own.products:
            run(slice_graph(sliced, 0, own.products))
        steps += [
            Receive(slice_name(each, rank), rank) for rank, work in enumerate(others, 1) for each in work.products
        ]
    # An input that is only sent on is not an input of any engine.
    taken = {value.name for graph in graphs for value in graph.inputs}
    taken |= {step.value for step in steps if isinstance(step, Send)}
    inputs = [name for name in names(stage.feeds) if name in taken]
    return _program(graphs, steps, inputs, names(stage.outputs))


def _helper_program(sliced: SlicedProducts, number: int) -> RankProgram:
    """Any other rank receives the inputs of its products, and sends its columns of their results."""
    graphs: list[ir.Graph] = []
    steps: list[Step] = []
    for work in sliced.work(number):
        if work.products:
            steps += [Receive(name, 0) for name in names(work.takes)]
            steps.append(Run(len(graphs)))
            graphs.append(slice_graph(sliced, number, work.products))
            steps += [Send(slice_name(product, number), 0) for product in work.products]
    return _program(graphs, steps, [], [])


def _program(
    graphs: Iterable[ir.Graph], steps: Iterable[Step], inputs: Iterable[str], outputs: Iterable[str]
) -> RankProgram:
    graphs = tuple(keep_unfused(graph) for graph in graphs if graph.outputs)
    return RankProgram(graphs, tuple(steps), tuple(inputs), tuple(outputs))
