"""Prevents copies and fusions of weights that ONNX Runtime would make when it loads an engine.

On GPUs: exporters write a linear layer as a weight, a Transpose and a product. ONNX Runtime folds the Transpose, so
each of a rank's sessions would hold a transposed copy. com.microsoft.FusedMatMul reads a weight in either layout, so
all sessions share the weight in the file.

Everywhere: a dequantized weight is fused with its only reader. A rank may have one of several readers, and would then
compute otherwise than the model. So would an engine whose output is also quantized.
"""

from __future__ import annotations

import onnx_ir as ir

from splitc.compiler.graphs.editor import Editor
from splitc.compiler.graphs.matching import is_onnx, value_before
from splitc.compiler.graphs.origins import origin_of, take_place
from splitc.compiler.nodes import MICROSOFT
from splitc.compiler.operators.dequantized import is_fused
from splitc.compiler.operators.registry import operator_of

OPERATOR = "FusedMatMul"
# The types that the operator's kernels on GPUs take.
TYPES = (ir.DataType.FLOAT, ir.DataType.FLOAT16, ir.DataType.BFLOAT16, ir.DataType.DOUBLE)


def multiply_as_stored(graph: ir.Graph) -> None:
    """Replace products with transposed weights by FusedMatMul of the weights as stored, in place.

    Weights that anything else reads stay as they are. Nodes without readers afterwards stay in the graph.
    """
    editor = Editor(graph)
    for weight in list(graph.initializers.values()):
        readers = [node for node, _ in weight.uses()]
        if weight.dtype not in TYPES or not readers or not all(map(_is_transpose, readers)) or weight.is_graph_input():
            continue
        products = [use for node in readers for use in node.outputs[0].uses()]
        if not all(is_onnx(node, "MatMul") and place == 1 for node, place in products):
            continue
        for node, _ in products:
            made = editor.before(node, OPERATOR, node.inputs[0], weight, domain=MICROSOFT, transB=1)
            graph.opset_imports.setdefault(MICROSOFT, 1)
            take_place(made, node.outputs[0])


def _is_transpose(node: ir.Node) -> bool:
    """Whether a node is the Transpose of a constant matrix, and no output of the graph."""
    if not is_onnx(node, "Transpose") or node.outputs[0].is_graph_output():
        return False
    value = node.inputs[0]
    tensor = None if value is None else value.const_value
    return tensor is not None and list(node.attributes.get_ints("perm", (1, 0))) == [1, 0] and len(tensor.shape) == 2


def keep_weights_unfused(graph: ir.Graph) -> None:
    """Insert a Flatten after dequantized matrices that ONNX Runtime would fuse only on this rank, in place.

    It has no effect.
    """
    editor = Editor(graph)
    for node in list(graph):
        if not operator_of(node).dequantizes or not _is_matrix(node.inputs[0]):
            continue
        origin = origin_of(node)
        if origin is not None and is_fused(node) and not is_fused(origin):
            flat = editor.wrap(node.outputs[0], "Flatten", [node.outputs[0]], "unfused", axis=1)
            flat.producer().name = f"{flat.name}/unfused"  # type: ignore[union-attr]  # it was just made


def keep_outputs_exact(graph: ir.Graph) -> None:
    """Insert a Concat of one value before Transposes of outputs that are quantized behind them, in place.

    It has no effect. Without it, ONNX Runtime 1.31 quantizes before it transposes, and gives what was quantized as the
    output. Outputs of the model are left as they are there.
    """
    editor = Editor(graph)
    for value in graph.outputs:
        origin = origin_of(value)
        if origin is None or origin.is_graph_output():
            continue
        for node, _ in list(value.uses()):
            if is_onnx(node, "Transpose") and _leads_to_quantized(node):
                node.replace_input_with(0, editor.before(node, "Concat", value, axis=0))


def _leads_to_quantized(view: ir.Node) -> bool:
    """Whether a view's result is quantized, also behind other views."""
    readers = [reader for reader, _ in view.outputs[0].uses()]
    return any(
        is_onnx(reader, "QuantizeLinear")
        or ((operator_of(reader).is_view or is_onnx(reader, "Transpose")) and _leads_to_quantized(reader))
        for reader in readers
    )


def _is_matrix(value: ir.Value | None) -> bool:
    """Whether a value is a two-dimensional initializer, or its Transpose, which ONNX Runtime folds."""
    weight = value_before(value, "Transpose") or value
    return weight is not None and weight.is_initializer() and len(weight.shape or ()) == 2
