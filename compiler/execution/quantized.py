"""Nodes between DequantizeLinear and QuantizeLinear that ONNX Runtime fuses to one node, which computes in integers."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping

import onnx_ir as ir

from splitc.compiler.execution.liveness import Nodes
from splitc.compiler.graphs.matching import constant, is_onnx, made_by
from splitc.compiler.graphs.walks import producer_of
from splitc.compiler.inference.shapes import shape_of
from splitc.compiler.nodes import inputs_of

# How many inputs of an operator are data, which are dequantized where it computes in integers of 8 bits. What moves
# elements takes any (qdq_selector_action_transformer.cc in core/optimizer/qdq_transformer/selectors_actions).
_DATA = {
    **dict.fromkeys(("Conv", "Gemm"), 3),
    **dict.fromkeys(("MatMul", "Add", "Mul"), 2),
    **dict.fromkeys(("AveragePool", "GlobalAveragePool", "LeakyRelu", "Sigmoid", "Softmax"), 1),
}
_MOVING = ("Reshape", "Transpose", "Squeeze", "Unsqueeze", "Flatten", "Gather", "MaxPool", "Resize")
_ALL_DATA = ("Concat",)
# Products that give singles where nothing quantizes their result.
_PRODUCTS = ("MatMul", "Gemm")
_INTEGERS = {ir.DataType.UINT8, ir.DataType.INT8}
_RANGES = {
    ir.DataType.UINT8: (0, 255),
    ir.DataType.INT8: (-128, 127),
    ir.DataType.UINT16: (0, 65535),
    ir.DataType.INT16: (-32768, 32767),
}


# The bytes of a weight that MatMulNBits packs, relative to its own: as ONNX Runtime first makes it, and packed. 32
# elements have a scale of 4 bytes, which the kernel for int8 on CPUs holds two more times.
REPACKED = (1 + 4 / 32, 1 + 3 * 4 / 32)


def repacked_weights(nodes: Collection[ir.Node]) -> dict[ir.Node, ir.Value]:
    """The weights in 8 bits that products read dequantized, where ONNX Runtime makes both a MatMulNBits.

    It does in engines without a QuantizeLinear, for matrices with a scale for each column that nothing else reads
    (DQMatMulToMatMulNBits in qdq_selector_action_transformer.cc). Those with one scale do not count: equal ones are
    shared by then.
    """
    if any(node.op_type == "QuantizeLinear" for node in nodes):
        return {}
    weights = ((node, _repacked(node)) for node in nodes if is_onnx(node, "MatMul"))
    return {node: weight for node, weight in weights if weight is not None}


def _repacked(product: ir.Node) -> ir.Value | None:
    first, second = (made_by(value, "DequantizeLinear") for value in product.inputs)
    if second is None or first is not None:
        return None
    weight, scale, *_ = read = inputs_of(second)
    if any(map(_has_other_readers, (*read, second.outputs[0]))) or not weight.is_initializer():
        return None
    by_columns = shape_of(scale) == shape_of(weight)[1:] and second.attributes.get_int("axis", 1) in (1, -1)
    is_matrix = len(shape_of(weight)) == 2 and weight.dtype in _INTEGERS
    return weight if is_matrix and by_columns and not second.attributes.get_int("block_size", 0) else None


def _has_other_readers(value: ir.Value) -> bool:
    return value.is_graph_output() or len(value.uses()) != 1


def find_quantized(nodes: Nodes) -> tuple[Nodes, dict[ir.Node, ir.Node]]:
    """The nodes that run on CPUs, and those that compute in integers, with the node of the file that each replaces.

    A node whose data are all dequantized reads the quantized values. If its result is only quantized again, the
    QuantizeLinear represents both. A product may read its weight quantized, and compute in floating point.
    """
    sources = {node.outputs[0]: node.inputs[0] for node in nodes.order if node.op_type == "DequantizeLinear"}
    if not sources:
        return nodes, {}
    own: dict[ir.Node, list[ir.Value]] = {}
    stands_for: dict[ir.Node, ir.Node] = {}
    inner = set[ir.Node]()
    for node in repacked_weights(nodes.order):
        own[node] = [sources.get(value) or value for value in nodes.reads(node)]
    for node in nodes.order:
        if not _reads_only(node, sources):
            continue
        end, between = _quantized_by(node, nodes)
        if end is not node or node.op_type in _PRODUCTS:
            own[end] = [sources.get(value) or value for value in nodes.reads(node)]
            stands_for[end] = node
            inner.update(between)
    left = nodes.without(inner, own)
    unread = (value for value in sources if value not in left.readers and value not in nodes.kept)
    return left.without(set(map(producer_of, unread))), stands_for


def _reads_only(node: ir.Node, sources: Mapping[ir.Value, ir.Value | None]) -> bool:
    """Whether all of a node's data are dequantized from a type it can compute in. `sources` are the quantized values.

    The last one may be a bias of 32 bits.
    """
    moves = node.op_type in _MOVING
    count = len(node.inputs) if node.op_type in _ALL_DATA else 1 if moves else _DATA.get(node.op_type, 0)
    data = [value for value in node.inputs[:count] if value is not None]
    if node.domain or not data or any(value not in sources for value in data):
        return False
    types = {source.dtype for value in data[:2] if (source := sources[value]) is not None}
    return moves or types <= _INTEGERS


def _quantized_by(node: ir.Node, nodes: Nodes) -> tuple[ir.Node, list[ir.Node]]:
    """The QuantizeLinear that alone reads a node's result, and the nodes between; else the node itself, and none."""
    between = [node]
    while (after := nodes.only_reader(value := between[-1].outputs[0])) is not None:
        if after.op_type == "QuantizeLinear" and after.inputs[0] is value:
            return after, between
        if len(between) > 1 or not _only_bounds(after, nodes.only_reader(after.outputs[0])):
            break
        between.append(after)
    return node, []


def _only_bounds(node: ir.Node, after: ir.Node | None) -> bool:
    """Whether a node clips to bounds that the quantization `after` it implies anyway.

    See clip_quantizelinear.cc and relu_quantizelinear.cc in core/optimizer/qdq_transformer.
    """
    if not is_onnx(node, "Relu", "Clip") or after is None or after.op_type != "QuantizeLinear":
        return False
    scale, zero = (constant(value) for value in (*after.inputs[1:3], None, None)[:2])
    dtype = after.outputs[0].dtype
    if scale is None or zero is None or dtype not in _RANGES:
        return False
    least, most = (0.0, math.inf) if node.op_type == "Relu" else _bounds(node)
    low, high = (scale * (number - zero) for number in _RANGES[dtype])
    return least <= low and most >= high


def _bounds(clip: ir.Node) -> tuple[float, float]:
    """The bounds of a Clip; an empty range if they are computed."""
    least, most = (*clip.inputs[1:3], None, None)[:2]
    numbers = constant(least), constant(most)
    if any(value is not None and number is None for value, number in zip((least, most), numbers, strict=True)):
        return math.inf, -math.inf
    return -math.inf if numbers[0] is None else numbers[0], math.inf if numbers[1] is None else numbers[1]
