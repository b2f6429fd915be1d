"""The graph of a stage, copied from the model."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx_ir as ir

from splitc.compiler.analysis.stages import Stage, borrowed_sizes, find_size
from splitc.compiler.graphs.origins import note_sizes, stand_for
from splitc.compiler.graphs.reads import view_of
from splitc.compiler.inference.shapes import symbols_in
from splitc.compiler.lowering.open_shapes import note_axes, open_shape
from splitc.compiler.normal_form.graph import Graph
from splitc.compiler.sizes.inputs import symbols_of


def stage_graph(graph: Graph, stage: Stage) -> ir.Graph:
    """A stage as a new graph. Its inputs are feeds and received values, its outputs sent values and model outputs."""
    note_axes(graph.axis_counts)
    result = view_of(graph.graph, [*stage.takes, *stage.borrowed], stage.gives, stage.nodes).clone()
    _compute_borrowed(result, stage)
    _restore_shapes(graph, result)
    return result


def _restore_shapes(graph: Graph, result: ir.Graph) -> None:
    """Restore the shapes of the model's file, so that an engine sees the same shapes as in the unsplit model.

    splitc infers more shapes. With these ONNX Runtime would fuse more nodes: results would differ from the unsplit
    model's, and an encoder would take a tenth longer on CPUs (SkipLayerNormalization).
    """
    for value in (*result.inputs, *(value for node in result for value in node.outputs)):
        note_sizes(value, value.shape)
    whole = {value.name for value in (*graph.graph.inputs, *graph.graph.outputs)}
    symbols = frozenset[str]().union(*map(symbols_of, graph.graph.inputs))
    for value in (*result.inputs, *result.outputs):
        if value.name not in whole:
            value.shape = _shape_that_crosses(graph, value, symbols)
    for node in result:
        for value in node.outputs:
            if not value.is_graph_output():
                value.shape = graph.declared.get(value.name or "")
                value.type = value.type if value.shape is not None else None


def _shape_that_crosses(graph: Graph, value: ir.Value, symbols: frozenset[str]) -> ir.Shape | None:
    """The shape of a value between stages: the file's, or else the inferred sizes that are the same in all requests.

    A number in the file is omitted if the size depends on `symbols` of the inputs: exporters write 1 for a dynamic
    batch, and engines would refuse inputs of other sizes.
    """
    inferred, declared = value.shape, graph.declared.get(value.name or "")
    if declared is None:
        sizes = [size if isinstance(size, int) else None for size in inferred or ()]
        return ir.Shape(sizes) if inferred is not None else open_shape(value)
    if inferred is None or len(declared) != len(inferred):
        return declared
    follows = [frozenset() < symbols_in(own) <= symbols for own in inferred]
    pairs = zip(declared, follows, strict=True)
    return ir.Shape([None if varies and isinstance(size, int) else size for size, varies in pairs])


def _compute_borrowed(result: ir.Graph, stage: Stage) -> None:
    """Compute each borrowed shape vector from sizes of the stage's inputs, in place of an input for it.

    A shape vector is borrowed if the stage does not have the value that it is the shape of.
    """
    inputs = stage.takes
    own = dict(zip(inputs, result.inputs, strict=False))
    nodes: list[ir.Node] = []
    renamed: dict[ir.Value, str] = {}

    def add(operator: str, *values: ir.Value, **attributes: Any) -> ir.Value:
        nodes.append(ir.node(operator, values, attributes))
        return nodes[-1].outputs[0]

    def constant(*numbers: int) -> ir.Value:
        return add("Constant", value=ir.tensor(np.array(numbers, np.int64)))

    def entry(size: int | ir.SymbolicDim) -> ir.Value:
        if isinstance(size, int):
            return constant(size)
        place = find_size(size, inputs)
        assert place is not None
        index = constant(place[1])
        return add("Gather", add("Shape", own[place[0]]), index)

    for original, placeholder in zip(stage.borrowed, result.inputs[len(inputs) :], strict=True):
        entries = list(map(entry, borrowed_sizes(original)))
        joined = add("Concat", *entries, axis=0) if entries else constant()  # Concat needs at least one
        joined.type = ir.TensorType(ir.DataType.INT64)
        stand_for(joined, original)
        placeholder.replace_all_uses_with(joined, replace_graph_outputs=True)
        if joined.is_graph_output():
            renamed[joined] = original.name or ""
    if not nodes:
        return
    result.inputs[len(inputs) :] = []
    for number, node in enumerate(nodes):
        node.name = f"splitc_sizes_{number}"
        for value in node.outputs:
            value.name = renamed.get(value, f"splitc_sizes_{number}")
    if len(result):
        result.insert_before(result[0], nodes)
    else:
        result.extend(nodes)
