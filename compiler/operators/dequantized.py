"""Tells which dequantized weights ONNX Runtime fuses with a product."""

from __future__ import annotations

from collections import Counter

import onnx_ir as ir

from splitc.compiler.nodes import inputs_of
from splitc.compiler.remembered import remembered

# Operators that a QuantizeLinear behind them may make redundant.
CLIPS = ("Relu", "Clip")


def is_fused(node: ir.Node) -> bool:
    """Whether ONNX Runtime fuses this dequantization with a product, whose other input it then quantizes.

    It does if the product is the only reader of the dequantized matrix, its other input is not dequantized too, and its
    result is not quantized. If the scale has one element, no other node may read an equal one either: ONNX Runtime
    merges equal initializers.
    """
    number, matrix = _number(node.inputs[1]), node.outputs[0]
    own = number is None or node.graph is None or _readers(node.graph)[number] == 1
    reader = _only_reader(matrix)
    if reader is not None and reader.op_type == "Transpose":  # ONNX Runtime transposes the quantized weight
        matrix, reader = reader.outputs[0], _only_reader(reader.outputs[0])
    return own and reader is not None and not _meets_dequantized(reader, matrix) and not _is_quantized(reader)


def _only_reader(value: ir.Value) -> ir.Node | None:
    """The node that reads a value, if it is one, and the value is no output."""
    readers = [reader for reader, _ in value.uses()]
    return readers[0] if len(readers) == 1 and not value.is_graph_output() else None


def _meets_dequantized(product: ir.Node, matrix: ir.Value) -> bool:
    """Whether a product's other input is dequantized too."""
    makers = (other.producer() for other in inputs_of(product) if other is not matrix)
    return any(maker is not None and maker.op_type == "DequantizeLinear" for maker in makers)


def _is_quantized(product: ir.Node) -> bool:
    """Whether the result is quantized, or goes alone through a Relu or Clip, behind which ONNX Runtime would do so.

    See GetQDQSelection in core/optimizer/qdq_transformer/selectors_actions/qdq_selectors.cc.
    """
    readers = [reader for reader, _ in product.outputs[0].uses()]
    if any(reader.op_type == "QuantizeLinear" for reader in readers):
        return True
    if len(readers) != 1 or readers[0].op_type not in CLIPS:
        return False
    bounds = [bound for bound in readers[0].inputs[1:] if bound is not None]
    return all(bound.const_value is not None for bound in bounds) and _only_reader(readers[0].outputs[0]) is not None


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
