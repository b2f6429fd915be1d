"""Dequantized weights that ONNX Runtime fuses with a product in a rank's graph, but not in the model, are kept apart.

It fuses a dequantized weight with the product that is its only reader, and then quantizes the product's other input. It
does not if several products read the weight. That must not change where a split separates these.
"""

from __future__ import annotations

import onnx_ir as ir

from splitc.compiler.frontend.editor import Editor
from splitc.compiler.frontend.origins import origin_of
from splitc.compiler.operators.registry import operator_of


def keep_weights_unfused(graph: ir.Graph) -> ir.Graph:
    """Insert a Flatten, which changes nothing, after each dequantized matrix that is left with one reader, in place."""
    editor = Editor(graph)
    for node in list(graph):
        weight = node.inputs[0] if node.inputs else None
        if not operator_of(node).dequantizes or weight is None or not weight.is_initializer():
            continue
        if len(weight.shape or ()) == 2 and _readers(node) == 1 and _readers(origin_of(node)) > 1:
            dtype, shape = node.outputs[0].type, node.outputs[0].shape
            flat = editor.wrap(node.outputs[0], "Flatten", [node.outputs[0]], "unfused", axis=1)
            flat.type, flat.shape = dtype, shape
            flat.producer().name = f"{flat.name}/unfused"  # type: ignore[union-attr]  # it was just made
    return graph


def _readers(node: ir.Node | None) -> int:
    """The number of readers of a node's result; being an output counts as one."""
    if node is None:
        return 0
    return len(node.outputs[0].uses()) + node.outputs[0].is_graph_output()
