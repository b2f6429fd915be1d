"""Prepares ranks' graphs for a build: finds the sizes of inputs, fixes those that can't change, and names blocks.

The ranks' programs run on shapes instead of data.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from queue import SimpleQueue
from typing import Any

import numpy as np
import onnx_ir as ir

from splitc.compiler.analysis.facts import Analysis
from splitc.compiler.errors import ModelError
from splitc.compiler.graphs.origins import take_place
from splitc.compiler.inference.shapes import bind_shapes
from splitc.compiler.lowering.programs import names
from splitc.compiler.lowering.rank_forms import COLLECTIVE
from splitc.compiler.packaging.build_messages import BLOCK
from splitc.compiler.planning.split import RankProgram
from splitc.compiler.request.shapes import Shape
from splitc.runtime.arrays.array import Array
from splitc.runtime.package.manifest import Sizes
from splitc.runtime.package.parts import part_shape
from splitc.runtime.package.steps import Reduce
from splitc.runtime.ranks.loop import Program, execute
from splitc.runtime.threads.futures import Executor

# The block of nodes that belong to none: masks, rotary tables, and nodes that a split adds.
SHARED = "shared"
# Beyond the end of any shape.
MOST = 1 << 30


def fit_to_build(analysis: Analysis, programs: Sequence[RankProgram]) -> Iterator[RankProgram]:
    """The ranks' programs with the input sizes that engines are built for. Their graphs are prepared, in place.

    Raises ModelError if the size of an engine's input can't be known.
    """
    sizes = engine_sizes(programs, (analysis.smallest, analysis.typical, analysis.shapes))
    blocks = {
        value.name or "": block.name
        for block in analysis.partition.blocks
        for node in block.nodes
        for value in node.outputs
    }
    for program, own in zip(programs, sizes, strict=True):
        for graph, inputs in zip(program.graphs, own, strict=True):
            prepare_graph(graph, inputs, blocks)
        yield replace(program, sizes=tuple(own))


def prepare_graph(graph: ir.Graph, sizes: Mapping[str, Sizes], blocks: Mapping[str, str]) -> None:
    """Fix the input sizes that can't change, and name each node and its block, in place.

    Operators that older versions of TensorRT misread are replaced.
    """
    for value in (value for value in graph.inputs if value.name in sizes):
        low, _, high = sizes[value.name or ""].shapes
        before: list[Any] = list(value.shape) if value.shape is not None else [None] * len(low)
        # TensorRT builds better engines for fixed sizes.
        value.shape = ir.Shape([a if a == b else old for a, b, old in zip(low, high, before, strict=True)])
    for node in [node for node in graph if node.op_type == "Shape" and node.attributes]:
        _slice_shape(graph, node)
    for node in graph:
        name = node.outputs[0].name or ""
        node.name = node.name or name
        node.metadata_props[BLOCK] = blocks.get(name, SHARED)


def _slice_shape(graph: ir.Graph, node: ir.Node) -> None:
    """Replace the `start` and `end` of a Shape (opset 15) by a Slice: TensorRT's parsers before 10 ignore them."""
    start, end = node.attributes.get_int("start", 0), node.attributes.get_int("end", MOST)
    result, source = node.outputs[0], node.inputs[0]
    whole = ir.node("Shape", [source])
    bounds = [ir.node("Constant", [], {"value": ir.tensor(np.array([bound], np.int64))}) for bound in (start, end)]
    part = ir.node("Slice", [whole.outputs[0], *(bound.outputs[0] for bound in bounds)])
    for place, new in enumerate((whole, *bounds)):
        new.outputs[0].name = f"{result.name}/whole" if place == 0 else f"{result.name}/bound{place}"
        new.outputs[0].type = ir.TensorType(ir.DataType.INT64)
    graph.insert_before(node, [whole, *bounds, part])
    take_place(part.outputs[0], result)
    graph.remove(node, safe=True)


@dataclass(frozen=True, eq=False)
class Known:
    """A value's shape, and its numbers if they follow from shapes. None is unknown."""

    shape: Shape | None
    numbers: Array | None = None


class ShapeEngine:
    """A segment of a rank's graph as an engine that computes shapes from shapes. It records its inputs in `given`."""

    optional: frozenset[str] = frozenset()
    capture_blocker: str | None = None

    def __init__(self, graph: ir.Graph) -> None:
        self._model = ir.Model(graph.clone(), ir_version=10)
        for node in self._model.graph:
            if node.op_type == COLLECTIVE:  # it keeps the shape, but shape inference does not know it
                node.op_type = "Identity"
                node.attributes.clear()
        self.inputs = names(graph.inputs)
        self.outputs = names(graph.outputs)
        self.given: dict[str, Known] = {}

    def run(self, values: Mapping[str, Any], into: Mapping[str, Any]) -> dict[str, Any]:
        self.given = {name: values[name] for name in self.inputs}
        shapes = {name: known.shape for name, known in self.given.items() if known.shape is not None}
        if unknown := [name for name in self.inputs if name not in shapes]:
            raise ModelError(
                f"the size of '{unknown[0]}', which crosses a cut, depends on data or can't be inferred, and TensorRT "
                "engines need known sizes: use --engine onnxruntime"
            )
        bound = bind_shapes(self._model, shapes, {name: known.numbers for name, known in self.given.items()})
        certain = {name: shape for name, shape in bound.shapes.items() if name not in bound.uncertain}
        return {name: Known(certain.get(name), bound.constants.get(name)) for name in self.outputs}


def engine_sizes(
    programs: Sequence[RankProgram], ranges: Sequence[Mapping[str, Shape]]
) -> list[list[dict[str, Sizes]]]:
    """The sizes of each engine's inputs, for each rank and each of its engines.

    `ranges` are the smallest, the typical and the largest shapes of the model's inputs. Raises ModelError if the size
    of an engine's input can't be known.
    """
    run = cache(lambda shapes: _run_on_shapes(programs, dict(shapes)))  # they are often the same shapes
    by_range = [run(tuple(shapes.items())) for shapes in ranges]
    return [
        [
            {name: _sizes(low[name], middle[name], high[name]) for name in low}
            for low, middle, high in zip(*three, strict=True)
        ]
        for three in zip(*by_range, strict=True)
    ]


def _sizes(*three: Known) -> Sizes:
    low, middle, high = (list(known.shape or ()) for known in three)
    numbers = [
        known.numbers.reshape(-1).tolist()
        for known in three
        if known.numbers is not None and np.issubdtype(known.numbers.dtype, np.integer)
    ]
    return Sizes((low, middle, high), tuple(numbers) if len(numbers) == 3 else None)


class ShapeExchange:
    """A rank's exchange of shapes, by `queues` from each rank to each. A sum has the shape of its parts."""

    def __init__(self, rank: int, queues: Mapping[tuple[int, int], SimpleQueue[Any]]) -> None:
        self._rank, self._queues = rank, queues

    def send(self, target: int, name: str, value: Any) -> None:
        self._queues[self._rank, target].put(value)

    def receive(self, source: int, name: str) -> Any:
        return self._queues[source, self._rank].get()

    def all_reduce(self, step: Reduce, parts: Any) -> Any:
        return parts


def _run_on_shapes(programs: Sequence[RankProgram], shapes: Mapping[str, Shape]) -> list[list[dict[str, Known]]]:
    """The inputs of each engine of each rank if the model's inputs have these shapes."""
    ranks = range(len(programs))
    queues = {(source, target): SimpleQueue[Any]() for source in ranks for target in ranks}
    engines = [list(map(ShapeEngine, program.graphs)) for program in programs]

    def run(rank: int) -> None:
        parts = {part.name: part for part in programs[rank].parts}
        fed = {
            name: Known(part_shape(shapes[name], parts[name]) if name in parts else shapes[name])
            for name in programs[rank].inputs
        }
        program = Program(programs[rank].steps, engines[rank])
        execute(program, ShapeExchange(rank, queues), lambda: fed)

    with Executor(len(programs)) as pool:
        list(pool.map(run, ranks))
    return [[engine.given for engine in own] for own in engines]
