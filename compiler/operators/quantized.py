"""Operators that quantize and dequantize, and products with quantized weights."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import onnx_ir as ir

from splitc.compiler.nodes import input_at
from splitc.compiler.operators import axes as ax
from splitc.compiler.operators import scratch
from splitc.compiler.operators.axes import Axis
from splitc.compiler.operators.linear import expert_flops, integer_product_shape, product_flops, relate_experts, tokens
from splitc.compiler.operators.operation import Operation
from splitc.compiler.operators.operator import Operator, Shapes
from splitc.runtime.arrays.array import Array

# The reason for pinning an axis that quantization blocks do not divide evenly.
UNEVEN = "its quantization blocks do not divide the axis evenly"
# The reason for pinning the axes of a weight whose elements are in an order that only a GPU's kernel knows.
PREPACKED = "its weight is in the layout of a GPU's kernel"
# Multiples of this number of quantized weights are what QMoE takes on GPUs (moe_quantization.cc, ONNX Runtime 1.31).
EXPERT_TILE = 64


def linear_quantization(op: Operation) -> None:
    """There is one scale for the tensor, for each index of an axis, or for each block of an axis."""
    data, axis = op.input(0), op.number("axis", 1)
    op.relate_all(data, op.output())
    for scales in filter(None, op.given((1, 2))):
        places = data if len(scales) == len(data) else [data[axis]]
        for scale, place in zip(scales, places, strict=False):
            block = relate_blocks(op, place, scale)
            if ax.size_of(block) == op.number("block_size", 0):
                op.attributes["block_size"] = [block]


def relate_blocks(op: Operation, place: Axis, scale: Axis) -> Axis:
    """Relate an axis to its scales: one in all, one an index, or one a block. Returns the axis inside a block."""
    count, size = ax.size_of(scale), ax.size_of(place)
    if count == 1:
        return ()
    if size % count:
        op.whole([place, scale], UNEVEN)
        return ()
    block = ax.new_axis(size // count)
    op.relate(place, (*scale, *block))
    op.free([scale])
    return block


def dynamic_quantization(op: Operation) -> None:
    op.relate_all(op.input(0), op.output())
    op.reduced = ax.product(op.input(0))


def dynamically_quantized_product(op: Operation) -> None:
    """The columns of the second matrix are independent, with scales and bias. The first is quantized as a whole."""
    if len(op.input(1)) != 2:
        return
    columns = op.output()[-1]
    op.relate(op.input(1)[1], columns)
    for axis in itertools.chain(*op.given((2, 3, 4))):
        if ax.size_of(axis) == ax.size_of(columns):
            op.relate(axis, columns)


def matmul_blocks(op: Operation) -> None:
    """[..., K] x [N, K / block, bytes], with a scale and optionally a zero point for each block.

    Two zero points of 4 bits share a byte, so such blocks are only sharded in pairs.
    """
    if op.number("weight_prepacked", 0):
        op.opaque(PREPACKED)
        return
    data, weight, output = op.input(0), op.input(1), op.output()
    block, bits = op.number("block_size", 0), op.number("bits", 4)
    blocks, columns = weight[1], weight[0]
    op.whole([weight[2]])
    op.broadcast(data[:-1], output[:-1])
    op.relate(columns, output[-1])
    if ax.size_of(data[-1]) == ax.size_of(blocks) * block:
        inside = ax.new_axis(block)
        op.relate(data[-1], (*blocks, *inside))
        op.whole([inside], "its quantization blocks are indivisible")
        op.free([blocks])
    else:
        op.whole([data[-1], blocks], UNEVEN)
    op.contracted = data[-1]
    op.attributes.update(K=[data[-1]], N=[columns])
    relate_table(op, 2, columns, blocks)
    if op.has(3):
        relate_table(op, 3, columns, _zeros_of(op, 3, 2, blocks, bits))
    if op.has(4):
        op.whole([data[-1]], "its input g_idx assigns columns to blocks")
    if op.has(5):
        op.relate(op.input(5)[0], columns)
        op.add_on_one_rank = frozenset([5])


def matmul_flat_blocks(op: Operation) -> None:
    """[..., K] x [N, K] of 4 bits, whose bytes are one list, as the scales of blocks along K are."""
    data, columns, block = op.input(0), op.output()[-1], op.number("block_size", 0)
    op.broadcast(data[:-1], op.output()[:-1])
    if not op.number("transB", 1) or not block or ax.size_of(data[-1]) % block:
        return
    blocks, bytes_, pair = (ax.new_axis(size) for size in (ax.size_of(data[-1]) // block, block // 2, 2))
    inside = (*bytes_, *pair)
    op.relate(data[-1], (*blocks, *inside))
    op.relate(op.input(1)[0], (*columns, *blocks, *bytes_))
    op.relate(op.input(2)[0], (*columns, *blocks))
    op.whole([bytes_, pair], "its quantization blocks are indivisible")
    op.free([blocks, columns])
    op.contracted = data[-1]
    op.attributes.update(K=[data[-1]], N=[columns], block_size=[inside])


def _zeros_of(op: Operation, number: int, scale: int, blocks: Axis, bits: int) -> Axis:
    """The axis of the blocks' zero points, input `number`, several of which may share a byte."""
    zeros, scales = op.node.inputs[number], op.node.inputs[scale]
    packed = zeros is not None and scales is not None and zeros.dtype != scales.dtype
    together = 8 // bits if packed else 1
    bytes_ = ax.new_axis(math.ceil(ax.size_of(blocks) / together))
    if ax.size_of(blocks) % together:
        op.whole([blocks, bytes_], "its zero points share bytes")
    else:
        shared = ax.new_axis(together)
        op.relate(blocks, (*bytes_, *shared))
        op.whole([shared], "its zero points share bytes")
    return bytes_


def relate_table(op: Operation, number: int, columns: Axis, blocks: Axis) -> None:
    """Relate an input with one entry per column and block, as a matrix or a vector."""
    table = op.input(number)
    if len(table) == 1:
        op.relate(table[0], (*columns, *blocks))
    else:
        op.relate_all(table, [columns, blocks])


def quantized_experts(op: Operation) -> None:
    """As `experts`, with weights of which a byte holds several, [experts, inner, bytes] and [experts, hidden, bytes].

    There is a scale for each row, or for each block of a row. Kernels on GPUs have layouts of their own, take multiples
    of EXPERT_TILE, and do not take single precision.
    """
    tokens(op)
    data, prepacked = op.node.inputs[0], op.number("weights_prepacked", -1)
    on_gpus = data is None or data.dtype != ir.DataType.FLOAT
    if prepacked == 1 or (prepacked and on_gpus):
        op.whole(itertools.chain(*op.given((2, 5, 8))), PREPACKED)
        return
    if op.node.attributes.get_string("quant_type", "int") != "int" or not op.has(2, 3, 5, 6):
        return
    by_blocks = len(op.input(6)) == 3
    if not by_blocks and op.has(11):
        return  # zero points of several rows share a byte
    projections = ((2, 3, 11, "fc1"), (5, 6, 12, "fc2"), (8, 9, 13, "fc3"))
    first, second, third = (_numbers_of(op, *places) for places in projections)
    hidden = [ax.product(numbers) for numbers in (first, third) if numbers is not None]
    if first is None or second is None or {*map(ax.size_of, hidden)} != {ax.size_of(op.input(0)[-1])}:
        return
    outer, block = second
    together = max(1, EXPERT_TILE // ax.size_of(block)) if on_gpus else 1
    if ax.size_of(outer) % together or not relate_experts(op, (*outer, *block), (2, 3, 4, 11), (8, 9, 10, 13)):
        return
    tile = ax.new_axis(together)
    op.relate(outer, (*ax.new_axis(ax.size_of(outer) // together), *tile))
    op.whole([tile], f"kernels on GPUs take multiples of {EXPERT_TILE}")
    op.free([outer])
    op.contracted = (*outer, *block)
    op.add_on_one_rank = frozenset([7])
    _relate_hidden(op, hidden)
    _relate_choice(op)


def _numbers_of(op: Operation, weight: int, scales: int, zeros: int, name: str) -> tuple[Axis, Axis] | None:
    """The axis of the numbers that a projection sums over, as blocks and what is inside a block. None if it has none.

    `weight` has bytes of these numbers, [experts, rows, bytes]; `scales` and `zeros` have one for each block or row.
    """
    bits = op.number(f"{name}_expert_weight_bits", op.number("expert_weight_bits", 4))
    if not op.has(weight, scales) or 8 % bits:
        return None
    bytes_, by_blocks = op.input(weight)[2], len(op.input(scales)) == 3
    outer = op.input(scales)[2] if by_blocks else bytes_
    block = ax.new_axis(ax.size_of(bytes_) * 8 // bits // ax.size_of(outer))
    op.whole([block], "its quantization blocks are indivisible")
    op.exact = [*op.exact, block]
    if by_blocks:
        inside = ax.new_axis(ax.size_of(block) * bits // 8)
        op.relate(bytes_, (*outer, *inside))
        op.whole([inside])
        op.exact = [*op.exact, inside]
        if op.has(zeros):
            op.relate(op.input(zeros)[2], _zeros_of(op, zeros, scales, outer, bits))
    return outer, block


def _relate_hidden(op: Operation, summed: Sequence[Axis]) -> None:
    """The width of tokens is whole. Its axes are related, so that trials with other sizes fit together.

    `summed` are those that projections sum over.
    """
    hidden = op.input(0)[-1]
    for axis in summed:
        op.relate(hidden, axis)
    rows = [axes[1] for axes in op.given((5, 6, 7, 12))]
    for axis in (op.output()[-1], *(axis for axis in rows if ax.size_of(axis) == ax.size_of(hidden))):
        op.relate(axis, hidden)
    op.whole([hidden])


def _relate_choice(op: Operation) -> None:
    """The experts are whole, in groups of as many as each token goes through: trials with fewer groups fit too."""
    count, chosen = ax.size_of(op.input(2)[0]), ax.new_axis(op.number("k", 1))
    experts = (*ax.new_axis(count // ax.size_of(chosen)), *chosen)
    if ax.size_of(experts) == count:
        op.attributes["k"] = [chosen]
    else:
        experts = ax.new_axis(count)
        op.exact = [*op.exact, experts]
    for axis in (op.input(1)[1], *(axes[0] for axes in op.given(range(2, 14)))):
        op.relate(axis, experts)
    op.whole([experts])


def small_scales(op: Operation, number: int) -> Array | None:
    """Example scales for experts: gates are multiplied by values, which in half precision are soon infinite."""
    if number not in (3, 6, 9):
        return None
    return np.random.default_rng(number).uniform(0.01, 0.02, [ax.size_of(axis) for axis in op.input(number)])


def quantized_embed_layer_norm(op: Operation) -> None:
    """The sum of rows of three quantized tables, normalized; after the mask come their scales and zero points."""
    for axes in op.given((0, 1, 7)):
        op.relate_all(axes, op.output()[:2])
    if op.has_output(1):
        op.relate(op.output(1)[0], op.output()[0])
    op.whole(itertools.chain(op.output()[1:], *op.given(range(2, 7))), "it normalizes rows of tables")


def quantized_embed_shape(context: Any, node: ir.Node) -> None:
    """A row of the table of words for each token, in the type of its scale, and a number for each text."""
    ids, words, scale = node.inputs[0], node.inputs[2], node.inputs[8]
    if ids is None or ids.shape is None or words is None or words.shape is None or scale is None:
        return
    context.set_shape_and_dtype(node.outputs[0], ir.Shape([*ids.shape, words.shape[1]]), scale.dtype)
    context.set_shape_and_dtype(node.outputs[1], ir.Shape([ids.shape[0]]), ids.dtype)


def blocks_flops(node: ir.Node, inputs: Shapes, outputs: Shapes) -> int:
    return 2 * math.prod(outputs[0]) * node.attributes.get_int("K", 1)


def quantized_expert_flops(node: ir.Node, inputs: Shapes, outputs: Shapes) -> int:
    """As `expert_flops`, for weights of which a byte holds several."""
    return 8 // node.attributes.get_int("expert_weight_bits", 4) * expert_flops(node, inputs, outputs, (2, 5, 8))


def flat_product_shape(context: Any, node: ir.Node) -> None:
    """The rows of the data, and N columns, or K with the weight as it is stored."""
    data = node.inputs[0]
    if data is not None and data.shape is not None:
        columns = node.attributes.get_int("N" if node.attributes.get_int("transB", 1) else "K", 0)
        context.set_shape_and_dtype(node.outputs[0], ir.Shape([*data.shape[:-1], columns]), data.dtype)


def quantized_shape(context: Any, node: ir.Node) -> None:
    """The shape of the data, and the type of the zero point (uint8 without one)."""
    data, zero = node.inputs[0], input_at(node, 2)
    dtype = ir.DataType.UINT8 if zero is None or zero.dtype is None else zero.dtype
    context.set_shape_and_dtype(node.outputs[0], None if data is None else data.shape, dtype)


def dequantized_shape(context: Any, node: ir.Node) -> None:
    """The shape of the data, and the type of the scale."""
    data, scale = node.inputs[0], node.inputs[1]
    if data is not None and scale is not None and scale.dtype is not None:
        context.set_shape_and_dtype(node.outputs[0], data.shape, scale.dtype)


def zero_points(op: Operation, number: int) -> int | None:
    """Zeros for a DequantizeLinear's zero points of types that ONNX Runtime takes no others of: float8 and int32."""
    data = op.node.inputs[0]
    is_zero = data is not None and data.dtype is not None and not (data.dtype.is_integer() and data.dtype.bitwidth < 32)
    return 0 if number == 2 and is_zero else None


OPERATORS = (
    Operator("DequantizeLinear", linear_quantization, dequantizes=True, example_input=zero_points),
    Operator(
        "com.microsoft.DequantizeLinear",
        linear_quantization,
        shapes=dequantized_shape,
        dequantizes=True,
        example_input=zero_points,
    ),
    Operator("QuantizeLinear", linear_quantization, quantizes=True),
    Operator("com.microsoft.QuantizeLinear", linear_quantization, shapes=quantized_shape, quantizes=True),
    Operator("DynamicQuantizeLinear", dynamic_quantization, quantizes=True),
    Operator(
        "com.microsoft.DynamicQuantizeMatMul",
        dynamically_quantized_product,
        product_flops,
        integer_product_shape,
        quantizes=True,
        matrix_input=1,
    ),
    Operator(
        "com.microsoft.MatMulBnb4",
        matmul_flat_blocks,
        blocks_flops,
        flat_product_shape,
        is_product=True,
        matrix_input=1,
    ),
    Operator(
        "com.microsoft.MatMulNBits",
        matmul_blocks,
        blocks_flops,
        is_product=True,
        matrix_input=1,
        packed_scales=2,
        scratch=scratch.quantized_product,
        reserves=True,
        half_scratch=scratch.nothing,
    ),
    Operator(
        "com.microsoft.QMoE",
        quantized_experts,
        quantized_expert_flops,
        example_input=small_scales,
        experts=tuple(range(2, 14)),
    ),
    Operator(
        "com.microsoft.QEmbedLayerNormalization",
        quantized_embed_layer_norm,
        shapes=quantized_embed_shape,
        lookups=((0, 2), (1, 4)),
        masks=(7,),
        is_product=True,
        is_norm=True,
    ),
)
