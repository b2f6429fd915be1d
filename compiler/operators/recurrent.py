"""Operators for recurrent networks: RNN, GRU and LSTM."""

from __future__ import annotations

import math
from functools import partial

import onnx_ir as ir

from splitc.compiler.operators import scratch
from splitc.compiler.operators.operation import Operation
from splitc.compiler.operators.operator import Operator, Shapes


def recurrent_flops(node: ir.Node, inputs: Shapes, outputs: Shapes) -> int:
    """2 x steps x batch x (elements of the input weights + elements of the recurrent weights)."""
    if len(inputs[0]) != 3:
        return math.prod(outputs[0])
    return 2 * math.prod(inputs[0][:2]) * (math.prod(inputs[1]) + math.prod(inputs[2]))


def recurrent_steps(inputs: Shapes) -> int:
    """Steps x directions: cuDNN computes them one after another."""
    return inputs[0][0] * inputs[1][0] if len(inputs[0]) == len(inputs[1]) == 3 else 0


def recurrent(op: Operation) -> None:
    """Rows are independent, and so are directions.

    Inputs: data, weights of data and of states, bias, lengths, states (LSTM: 2), peepholes. Empty batches, which crash
    ONNX Runtime's kernels, do not occur: each rank has rows. Directions stay together if activations have numbers of
    their own, as not each of them takes one.
    """
    if op.number("layout", 0) == 0:
        rule = "s b i, d g i, d g h, d e, b, d b h, d b h, d p -> s d b h, d b h, d b h"
        numbered = {"activation_alpha", "activation_beta"} & op.node.attributes.keys()
        op.pattern(rule, whole="sighep" + ("d" if numbered else ""))
        op.directions = op.input(1)[0] if op.has(1) else ()


_network = partial(Operator, axes=recurrent, flops=recurrent_flops, steps=recurrent_steps)
OPERATORS = (
    _network("GRU", states={1: 5}, crashes_empty=(0, 1), scratch=scratch.recurrent),
    _network("LSTM", states={1: 5, 2: 6}, crashes_empty=(1,), scratch=scratch.recurrent),
    _network("RNN", states={1: 5}, scratch=scratch.simple_recurrent),
    Operator(
        "com.microsoft.DynamicQuantizeLSTM",
        flops=recurrent_flops,
        quantizes=True,
        states={1: 5, 2: 6},
        crashes_empty=(1,),
        scratch=scratch.quantized_recurrent,
    ),
)
