"""Tells which dequantized weights ONNX Runtime fuses with a product."""

from __future__ import annotations

from collections import Counter

import onnx_ir as ir

from splitc.compiler.remembered import remembered


def is_fused(node: ir.Node) -> bool:
    """Whether ONNX Runtime fuses this dequantization with a product, whose other input it then quantizes.

    It does if the product is the only reader of the dequantized matrix, and its other input is not dequantized too. If
    the scale has one element, no other node may read an equal one either: ONNX Runtime merges equal initializers.
    """
    number, matrix = _number(node.inputs[1]), node.outputs[0]
    own = number is None or node.graph is None or _readers(node.graph)[number] == 1
    return own and len(matrix.uses()) + matrix.is_graph_output() == 1 and not _meets_dequantized(matrix)


def _meets_dequantized(matrix: ir.Value) -> bool:
    """Whether a reader of a dequantized matrix reads another dequantized value."""
    kind = getattr(matrix.producer(), "op_type", None)
    others = (other for reader, _ in matrix.uses() for other in reader.inputs if other is not None)
    makers = (other.producer() for other in others if other is not matrix)
    return any(maker is not None and maker.op_type == kind for maker in makers)


@remembered
def _readers(graph: ir.Graph) -> Counter[tuple[object, ...]]:
    """How often a graph's nodes read initializers of one element, by their number."""
    values = (value for node in graph for value in node.inputs)
    return Counter(number for number in map(_number, values) if number is not None)


def _number(value: ir.Value | None) -> tuple[object, ...] | None:
    """A key of an initializer of one element; None for other values."""
    tensor = value.const_value if value is not None and value.is_initializer() else None
    if tensor is None or tensor.size != 1 or not tensor.dtype.is_floating_point():
        return None
    return tensor.dtype, tuple(tensor.shape), tensor.tobytes()
