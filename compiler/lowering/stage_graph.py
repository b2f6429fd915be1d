"""A stage as a graph of its own."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from splitc.compiler.analysis.stages import Stage, borrowed_sizes, find_size
from splitc.compiler.frontend.graph import Graph
from splitc.compiler.frontend.origins import stand_for


def stage_graph(graph: Graph, stage: Stage) -> ir.Graph:
    """The stage as a graph of its own, from what it is fed and receives to the model's outputs and what it sends."""
    weights = dict.fromkeys(value for node in stage.nodes for value in graph.weights(node))
    view = ir.GraphView(
        [*stage.takes, *stage.borrowed],
        stage.gives,
        nodes=stage.nodes,
        initializers=tuple(weights),
        opset_imports=graph.graph.opset_imports,
        name=graph.graph.name,
        doc_string=graph.graph.doc_string,
        metadata_props=graph.graph.metadata_props,
    )
    result = view.clone()
    _compute_borrowed(result, stage)
    _forget_shapes(graph, result)
    return result


def _forget_shapes(graph: Graph, result: ir.Graph) -> None:
    """Show an engine the shapes that it would see in the whole model: those that the model's file gives.

    splitc inferred more, and with more equal symbols in sight ONNX Runtime fuses more: other numbers than the unsplit
    model's, and on the CPU slower ones (SkipLayerNormalization costs a tenth of an encoder's time).
    """
    whole = {value.name for value in (*graph.graph.inputs, *graph.graph.outputs)}
    for value in (*result.inputs, *result.outputs):
        if value.name not in whole and value.shape is not None:
            numbers = ir.Shape([size if isinstance(size, int) else None for size in value.shape])
            value.shape = graph.annotated.get(value.name or "", numbers)
    for node in result:
        for value in node.outputs:
            if not value.is_graph_output():
                value.shape = graph.annotated.get(value.name or "")
                value.type = value.type if value.shape is not None else None


def _compute_borrowed(result: ir.Graph, stage: Stage) -> None:
    """Make each borrowed shape vector from the sizes of the stage's inputs, and take it off the inputs."""
    inputs = stage.takes
    own = dict(zip(inputs, result.inputs, strict=False))
    nodes: list[ir.Node] = []
    renamed: dict[ir.Value, str] = {}
    for original, placeholder in zip(stage.borrowed, result.inputs[len(inputs) :], strict=True):
        pieces = []
        for size in borrowed_sizes(original):
            if isinstance(size, int):
                pieces.append(_constant(size, nodes))
                continue
            place = find_size(size, inputs)
            assert place is not None
            shape = ir.node("Shape", [own[place[0]]])
            piece = ir.node("Gather", [shape.outputs[0], _constant(place[1], nodes)])
            nodes += [shape, piece]
            pieces.append(piece.outputs[0])
        joined = ir.node("Concat", pieces, {"axis": 0})
        nodes.append(joined)
        joined.outputs[0].type = ir.TensorType(ir.DataType.INT64)
        stand_for(joined.outputs[0], original)
        placeholder.replace_all_uses_with(joined.outputs[0], replace_graph_outputs=True)
        if joined.outputs[0].is_graph_output():
            renamed[joined.outputs[0]] = original.name or ""
    if not nodes:
        return
    del result.inputs[len(inputs) :]
    for number, node in enumerate(nodes):
        node.name = f"splitc_sizes_{number}"
        for value in node.outputs:
            value.name = renamed.get(value, f"splitc_sizes_{number}")
    first = result[0] if len(result) else None
    if first is None:
        result.extend(nodes)
    else:
        result.insert_before(first, nodes)


def _constant(number: int, nodes: list[ir.Node]) -> ir.Value:
    node = ir.node("Constant", [], {"value": ir.tensor(np.array([number], np.int64))})
    nodes.append(node)
    return node.outputs[0]
