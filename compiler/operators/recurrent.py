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


OPERATORS = (
    Operator("GRU", flops=recurrent_flops),
    Operator("LSTM", flops=recurrent_flops),
    Operator("RNN", flops=recurrent_flops),
)
