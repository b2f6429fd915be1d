"""Recurrent networks as one operator."""

from __future__ import annotations

import math

import onnx_ir as ir

from splitc.compiler.operators.operator import Operator, Shapes


def recurrent_flops(node: ir.Node, inputs: Shapes, outputs: Shapes) -> int:
    """2 x steps x batch x (elements of the input weights + elements of the recurrent weights)."""
    if len(inputs[0]) != 3:
        return math.prod(outputs[0])
    return 2 * math.prod(inputs[0][:2]) * (math.prod(inputs[1]) + math.prod(inputs[2]))


# Their rows are independent, but ONNX Runtime's kernels end the process where there are none, as on a rank that has
# nothing: so no rule relates the axes.
OPERATORS = (
    Operator("GRU", flops=recurrent_flops, states={1: 5}, crashes_empty=True),
    Operator("LSTM", flops=recurrent_flops, states={1: 5, 2: 6}, crashes_empty=True),
    Operator("RNN", flops=recurrent_flops, states={1: 5}),
    Operator(
        "com.microsoft.DynamicQuantizeLSTM",
        flops=recurrent_flops,
        quantizes=True,
        states={1: 5, 2: 6},
        crashes_empty=True,
    ),
)
