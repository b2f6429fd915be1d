"""Replaces the indices of a list's elements by a Range, where torch's older exporter has them counted.

It writes arange(n), for an index, as NonZero(ConstantOfShape(n)): the numbers of those elements of a list that are not
0, which all are. Their number seems to depend on data, and a GPU tells it to the CPU.
"""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from splitc.compiler.graphs.editor import Editor
from splitc.compiler.graphs.matching import filled_with, is_onnx, made_by
from splitc.compiler.inference.symbolic import shapes_by_onnx

# The first opset with the operator Range.
RANGE = 11


def count_by_range(model: ir.Model) -> None:
    """Replace NonZero of lists that are filled with a number other than 0, in place."""
    lists = [node for node in model.graph if is_onnx(node, "NonZero")]
    counted = {node: sizes for node in lists if (sizes := _filled(node)) is not None}
    if not counted or model.opset_imports.get("", 1) < RANGE:
        return
    shapes, editor = shapes_by_onnx(model), Editor(model.graph)
    for node, sizes in counted.items():
        shape = shapes.get(node.inputs[0].name if node.inputs[0] else None)
        if shape is not None and shape.rank() == 1:
            first, step = (editor.constant(np.array(number, np.int64)) for number in (0, 1))
            numbers = editor.before(node, "Range", first, editor.before(node, "Squeeze", sizes), step)
            editor.replace(node, ir.node("Reshape", [numbers, editor.numbers(1, -1)]))


def _filled(node: ir.Node) -> ir.Value | None:
    """The sizes that a NonZero's input is filled to, with a number other than 0; None for other inputs."""
    maker = made_by(node.inputs[0], "ConstantOfShape")
    return maker.inputs[0] if maker is not None and filled_with(maker).any() else None
