"""The input sizes of engines that are built for known sizes: the ranks' programs run on shapes instead of data."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx_ir as ir

from splitc.compiler.errors import ModelError
from splitc.compiler.frontend.shapes import bind_shapes
from splitc.compiler.lowering.programs import names
from splitc.compiler.lowering.rank_forms import COLLECTIVE
from splitc.compiler.planning.split import RankProgram
from splitc.compiler.request.shapes import Shape
from splitc.runtime.arrays.array import Array
from splitc.runtime.collectives.threads import connect
from splitc.runtime.package.manifest import Sizes
from splitc.runtime.package.parts import part_shape
from splitc.runtime.ranks.loop import Program, execute
from splitc.runtime.threads.futures import Executor


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
    inputs: dict[tuple[tuple[str, Shape], ...], list[list[dict[str, Known]]]] = {}
    keys = [tuple(shapes.items()) for shapes in ranges]
    for key, shapes in zip(keys, ranges, strict=True):
        if key not in inputs:
            inputs[key] = _run_on_shapes(programs, shapes)
    smallest, typical, largest = (inputs[key] for key in keys)
    return [
        [
            {name: _sizes(low[name], middle[name], high[name]) for name in low}
            for low, middle, high in zip(*three, strict=True)
        ]
        for three in zip(smallest, typical, largest, strict=True)
    ]


def _sizes(*three: Known) -> Sizes:
    low, middle, high = (list(known.shape or ()) for known in three)
    numbers = [
        known.numbers.reshape(-1).tolist()
        for known in three
        if known.numbers is not None and np.issubdtype(known.numbers.dtype, np.integer)
    ]
    return Sizes((low, middle, high), tuple(numbers) if len(numbers) == 3 else None)


def _run_on_shapes(programs: Sequence[RankProgram], shapes: Mapping[str, Shape]) -> list[list[dict[str, Known]]]:
    """The inputs of each engine of each rank if the model's inputs have these shapes."""
    transports = connect(len(programs), lambda operation, total, part: None)
    engines = [list(map(ShapeEngine, program.graphs)) for program in programs]

    def run(rank: int) -> None:
        parts = {part.name: part for part in programs[rank].parts}
        fed = {
            name: Known(part_shape(shapes[name], parts[name]) if name in parts else shapes[name])
            for name in programs[rank].inputs
        }
        program = Program(programs[rank].steps, engines[rank])
        execute(program, transports[rank], lambda: fed)

    with Executor(len(programs)) as pool:
        list(pool.map(run, range(len(programs))))
    return [[engine.given for engine in own] for own in engines]
