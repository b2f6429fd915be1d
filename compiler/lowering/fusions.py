"""Keep ONNX Runtime from fusing in a rank's graph what it does not fuse in the model.

It fuses a dequantized weight with the product that is its only reader, and then quantizes what it multiplies the weight
with. If several products read the weight it does not. A split must not change that where it puts them apart.
"""

from __future__ import annotations

import onnx_ir as ir

from splitc.compiler.frontend.origins import origin_of
from splitc.compiler.lowering.editor import Editor
from splitc.compiler.operators.registry import operator_of


def keep_unfused(graph: ir.Graph) -> ir.Graph:
    """Put a Flatten, which changes nothing, behind each dequantized matrix that lost readers, in place."""
    editor = Editor(graph)
    for node in list(graph):
        weight = node.inputs[0] if node.inputs else None
        if not operator_of(node).unpacks or weight is None or not weight.is_initializer():
            continue
        if len(weight.shape or ()) == 2 and _readers(node) == 1 and _readers(origin_of(node)) > 1:
            dtype, shape = node.outputs[0].type, node.outputs[0].shape
            flat = editor.wrap(node.outputs[0], "Flatten", [node.outputs[0]], "unfused", axis=1)
            flat.type, flat.shape = dtype, shape
            flat.producer().name = f"{flat.name}/unfused"  # type: ignore[union-attr]  # it was just made
    return graph


def _readers(node: ir.Node | None) -> int:
    """How many readers a node's result has; those of the graph's users count too."""
    if node is None:
        return 0
    return len(node.outputs[0].uses()) + node.outputs[0].is_graph_output()
