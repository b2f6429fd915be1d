"""Elementwise operators, with broadcasting."""

from __future__ import annotations

import onnx_ir as ir

from splitc.compiler.operators import scratch
from splitc.compiler.operators.operation import LINEAR, Operation
from splitc.compiler.operators.operator import Operator


def elementwise(op: Operation) -> None:
    """Each input is broadcast to the outputs."""
    for axes in (*op.inputs, *op.outputs[1:]):
        if axes is not None:
            op.broadcast(axes, op.output())


def add(op: Operation) -> None:
    elementwise(op)
    op.linear = (frozenset(range(len(op.inputs))),)
    op.add_on_one_rank = frozenset(range(len(op.inputs)))


def multiply(op: Operation) -> None:
    elementwise(op)
    op.linear = (frozenset([0]), frozenset([1]))


def scale(op: Operation) -> None:
    elementwise(op)
    op.linear = LINEAR


def divide(op: Operation) -> None:
    """Division of integers rounds, so it is not linear."""
    elementwise(op)
    op.linear = LINEAR if op.gives_floats else ()


def cast(op: Operation) -> None:
    """A cast is linear if it is lossless: then a sum after it is as exact as one before it."""
    source, target = op.node.inputs[0], op.node.outputs[0]
    op.relate_all(op.input(0), op.output())
    if op.has(1):
        op.free(op.input(1))
    if source is not None and source.dtype is not None and target.dtype is not None:
        op.linear = LINEAR if _keeps_numbers(source.dtype, target.dtype) else ()


def _keeps_numbers(source: ir.DataType, target: ir.DataType) -> bool:
    """Whether a cast is lossless. Integers count as single-precision numbers."""
    if not target.is_floating_point():
        return False
    need = source if source.is_floating_point() else ir.DataType.FLOAT
    return target.mantissa_bitwidth >= need.mantissa_bitwidth and target.exponent_bitwidth >= need.exponent_bitwidth


def where(op: Operation) -> None:
    elementwise(op)
    op.linear = (frozenset([1, 2]),)


NONLINEAR = """
    Acos Acosh Asin Asinh Atan Atanh BitShift BitwiseAnd BitwiseNot BitwiseOr BitwiseXor Celu Cos Cosh Elu Erf Gelu
    HardSigmoid HardSwish IsInf IsNaN LeakyRelu Mean Mish PRelu Relu Selu Shrink Sigmoid
    Sin Sinh Softplus Softsign Swish Tan ThresholdedRelu
"""
# Those of NONLINEAR that run in place, as do Clip, Tanh, Dropout, Cast, Softmax, LogSoftmax and Trilu: in profiles of
# ONNX Runtime 1.31 these nodes take no memory of their own.
OVERWRITING = "Celu Elu HardSigmoid LeakyRelu Relu Selu Sigmoid Softplus Softsign ThresholdedRelu"
GELUS = "com.microsoft.BiasGelu com.microsoft.FastGelu com.microsoft.Gelu com.microsoft.QuickGelu"
# Those that exporters also use in shape arithmetic.
OF_SIZES = """
    Abs And Ceil Equal Exp Floor Greater GreaterOrEqual Less LessOrEqual Log Mod Not Or Pow Reciprocal Sign Sqrt Xor
"""

OPERATORS = (
    *(Operator(name, elementwise, overwrites=name in OVERWRITING.split()) for name in NONLINEAR.split()),
    *(Operator(name, elementwise, scratch=scratch.biased) for name in GELUS.split()),
    *(Operator(name, elementwise, shape_arithmetic=True) for name in OF_SIZES.split()),
    # Decomposed dynamic quantization rounds activations.
    Operator("Round", elementwise, shape_arithmetic=True, quantizes=True),
    Operator("Clip", elementwise, shape_arithmetic=True, may_precede_softmax=True, overwrites=True),
    Operator("Max", elementwise, shape_arithmetic=True, may_precede_softmax=True),
    Operator("Min", elementwise, shape_arithmetic=True, may_precede_softmax=True),
    Operator("Tanh", elementwise, may_precede_softmax=True, overwrites=True),
    Operator("Add", add, shape_arithmetic=True, may_precede_softmax=True, may_make_angles=True, is_addition=True),
    Operator(
        "Sub",
        add,
        shape_arithmetic=True,
        may_precede_softmax=True,
        may_make_angles=True,
        is_addition=True,
        negated_inputs=frozenset([1]),
    ),
    Operator("Sum", add, is_addition=True),
    Operator("Mul", multiply, shape_arithmetic=True, may_precede_softmax=True, may_make_angles=True),
    Operator("Div", divide, shape_arithmetic=True, may_precede_softmax=True, may_make_angles=True),
    Operator("Neg", scale, shape_arithmetic=True, rearranges=True),
    Operator("Identity", scale, is_view=True, shape_arithmetic=True, passes_sizes=True, rearranges=True),
    Operator("Dropout", scale, random_if=2, overwrites=True),
    Operator("Cast", cast, shape_arithmetic=True, passes_sizes=True, rearranges=True, overwrites=True),
    Operator("CastLike", cast),
    Operator(
        "Where", where, shape_arithmetic=True, may_precede_softmax=True, scratch=scratch.selected, scratch_first=True
    ),
)
