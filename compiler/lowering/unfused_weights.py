"""Keeps dequantized weights unfused if ONNX Runtime would fuse them in a rank's graph, but not in the model."""

from __future__ import annotations

import onnx_ir as ir

from splitc.compiler.frontend.editor import Editor
from splitc.compiler.frontend.matching import value_before
from splitc.compiler.frontend.origins import origin_of
from splitc.compiler.operators.dequantized import is_fused
from splitc.compiler.operators.registry import operator_of


def keep_weights_unfused(graph: ir.Graph) -> ir.Graph:
    """Insert a Flatten, which changes nothing, after each dequantized matrix that is fused only here, in place."""
    editor = Editor(graph)
    for node in list(graph):
        if not operator_of(node).dequantizes or not _is_matrix(node.inputs[0]):
            continue
        origin = origin_of(node)
        if origin is not None and is_fused(node) and not is_fused(origin):
            dtype, shape = node.outputs[0].type, node.outputs[0].shape
            flat = editor.wrap(node.outputs[0], "Flatten", [node.outputs[0]], "unfused", axis=1)
            flat.type, flat.shape = dtype, shape
            flat.producer().name = f"{flat.name}/unfused"  # type: ignore[union-attr]  # it was just made
    return graph


def _is_matrix(value: ir.Value | None) -> bool:
    """Whether a value is a matrix of weights, or its Transpose, which ONNX Runtime folds when it loads the model."""
    weight = value_before(value, "Transpose") or value
    return weight is not None and weight.is_initializer() and len(weight.shape or ()) == 2
