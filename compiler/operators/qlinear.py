"""Operators with quantized inputs and outputs (QOperator format), which take the scales and zero points of both.

They round their results, so partial results can't be summed: the contracted axis is needed whole.
"""

from __future__ import annotations

import math
from typing import Any

import onnx_ir as ir
from onnx_shape_inference import registry

from splitc.compiler.nodes import input_at
from splitc.compiler.operators import scratch
from splitc.compiler.operators.elementwise import elementwise
from splitc.compiler.operators.linear import convolve, matrix, product, product_flops
from splitc.compiler.operators.operation import Operation
from splitc.compiler.operators.operator import Operator, Shapes
from splitc.compiler.operators.quantized import relate_blocks
from splitc.compiler.operators.shaping import join

ROUNDED = "partial products would be rounded"


def matmul(op: Operation) -> None:
    left, right, output = op.input(0), op.input(3), op.output()
    product(op, left, right)
    op.contracted = ()
    op.whole([left[-1]], ROUNDED)
    for axes in op.given((4, 5, 6, 7)):
        if axes:
            relate_blocks(op, output[-1], axes[-1])


def gemm(op: Operation) -> None:
    """Without a scale of the output, the result is float32, and may be partial."""
    left = matrix(op, 0, "transA")
    product(op, left, matrix(op, 3, "transB"))
    for axes in op.given((4, 5, 6)):  # the scales and zero points of columns, and a bias
        op.broadcast(axes, op.output())
    op.zero_point, op.add_on_one_rank = 2, frozenset([6])
    if op.has(7):
        op.contracted, op.add_on_one_rank = (), frozenset()
        op.whole([left[-1]], ROUNDED)


def convolution(op: Operation) -> None:
    if not op.number("channels_last", 0):
        op.whole([convolve(op, 3, (4, 5, 8))], ROUNDED)


def softmax(op: Operation) -> None:
    """Softmax works along one axis; before opset 13, along the given axis and all axes after it."""
    data, opset = op.input(0), op.number("opset", 13)
    first = op.number("axis", -1) % len(data)
    along = [first] if opset >= 13 else range(first, len(data))
    op.relate_others(along)


def concat(op: Operation) -> None:
    """Inputs are the result's scale and zero point, then the value, scale and zero point of each part."""
    join(op, range(2, len(op.inputs), 3))


def pool(op: Operation) -> None:
    """Channels are pooled independently."""
    if not op.number("channels_last", 0):
        op.relate_all(op.input(0)[:2], op.output()[:2])


def convolution_flops(node: ir.Node, inputs: Shapes, outputs: Shapes) -> int:
    return 2 * math.prod(outputs[0]) * math.prod(inputs[3][1:])


def gemm_shape(context: Any, node: ir.Node) -> None:
    """The shape of a Gemm, in the type of the output's zero point; float32 without one."""
    left, right, zero = node.inputs[0], node.inputs[3], input_at(node, 8)
    rows = None if left is None or left.shape is None else left.shape[node.attributes.get_int("transA", 0)]
    columns = None if right is None or right.shape is None else right.shape[1 - node.attributes.get_int("transB", 0)]
    shape = context.name_anonymous_dims_in_shape(ir.Shape([rows, columns]))
    context.set_shape_and_dtype(node.outputs[0], shape, ir.DataType.FLOAT if zero is None else zero.dtype)


def pool_shape(context: Any, node: ir.Node) -> None:
    """As for the float operator. Raises ValueError if channels come last."""
    if node.attributes.get_int("channels_last", 0):
        raise ValueError("the shape function only knows images with channels first")
    registry.get("", node.op_type.removeprefix("QLinear"), 19)(context, node)  # type: ignore[misc]  # never None


OPERATORS = (
    *(
        Operator(name, convolution, convolution_flops, quantizes=True, scratch=scratch.quantized_convolution)
        for name in ("QLinearConv", "com.microsoft.QLinearConv")
    ),
    Operator("QLinearMatMul", matmul, product_flops, matrix_input=3, quantizes=True),
    Operator("com.microsoft.QGemm", gemm, product_flops, gemm_shape, matrix_input=3, quantizes=True),
    # Their scales and zero points are scalars.
    Operator("com.microsoft.QLinearAdd", elementwise, quantizes=True),
    Operator("com.microsoft.QLinearMul", elementwise, quantizes=True),
    Operator("com.microsoft.QLinearWhere", elementwise, quantizes=True),
    Operator("com.microsoft.QLinearSigmoid", elementwise, quantizes=True),
    Operator("com.microsoft.QLinearLeakyRelu", elementwise, quantizes=True),
    Operator("com.microsoft.QLinearSoftmax", softmax, quantizes=True),
    Operator("com.microsoft.QLinearConcat", concat, quantizes=True),
    Operator("com.microsoft.QLinearAveragePool", pool, shapes=pool_shape, quantizes=True),
    Operator("com.microsoft.QLinearGlobalAveragePool", pool, shapes=pool_shape, quantizes=True),
)
