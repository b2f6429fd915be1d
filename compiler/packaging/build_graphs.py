"""Prepares a rank's graph for a build: fixes the sizes that can't change, and annotates nodes with their blocks."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import onnx_ir as ir

from splitc.compiler.analysis.facts import Analysis
from splitc.compiler.frontend.origins import take_place
from splitc.compiler.packaging.build_messages import BLOCK
from splitc.compiler.packaging.engine_sizes import engine_sizes
from splitc.compiler.planning.split import RankProgram
from splitc.runtime.package.manifest import Sizes

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
