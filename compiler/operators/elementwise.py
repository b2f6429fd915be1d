"""Operators that work element by element, with broadcasting."""

from __future__ import annotations

import onnx_ir as ir

from splitc.compiler.operators.operation import Operation
from splitc.compiler.operators.operator import Operator


def elementwise(op: Operation) -> None:
    """Every input is broadcast to the outputs."""
    for number in range(len(op.inputs)):
        if op.has(number):
            op.broadcast(op.input(number), op.output())
    for number in range(1, len(op.outputs)):
        if op.has_output(number):
            op.broadcast(op.output(number), op.output())


def nonlinear(op: Operation) -> None:
    elementwise(op)


def add(op: Operation) -> None:
    elementwise(op)
    op.linear = (frozenset(range(len(op.inputs))),)
    op.once = frozenset(range(len(op.inputs)))


def multiply(op: Operation) -> None:
    elementwise(op)
    op.linear = (frozenset([0]), frozenset([1]))


def scale(op: Operation) -> None:
    elementwise(op)
    op.linear = (frozenset([0]),)


def divide(op: Operation) -> None:
    """A division of integers is rounded, so it is not linear."""
    elementwise(op)
    op.linear = (frozenset([0]),) if op.gives_floats else ()


def cast(op: Operation) -> None:
    """A cast is linear where it keeps every number: then a sum after it is as exact as one before it."""
    source, target = op.node.inputs[0], op.node.outputs[0]
    op.relate_all(op.input(0), op.output())
    if op.has(1):
        op.free(op.input(1))
    if source is not None and source.dtype is not None and target.dtype is not None:
        op.linear = (frozenset([0]),) if _keeps_numbers(source.dtype, target.dtype) else ()


def _keeps_numbers(source: ir.DataType, target: ir.DataType) -> bool:
    """Whether a type has all numbers of another one. Integers count as numbers of single precision."""
    if not target.is_floating_point():
        return False
    need = source if source.is_floating_point() else ir.DataType.FLOAT
    return target.mantissa_bitwidth >= need.mantissa_bitwidth and target.exponent_bitwidth >= need.exponent_bitwidth


def where(op: Operation) -> None:
    elementwise(op)
    op.linear = (frozenset([1, 2]),)


NONLINEAR = """
    Acos Acosh Asin Asinh Atan Atanh BitShift BitwiseAnd BitwiseNot BitwiseOr BitwiseXor Celu Cos Cosh Elu Erf Exp Gelu
    HardSigmoid HardSwish IsInf IsNaN LeakyRelu Log Mean Mish PRelu Pow Reciprocal Relu Round Selu Shrink Sigmoid Sign
    Sin Sinh Softplus Softsign Swish Tan ThresholdedRelu
    com.microsoft.BiasGelu com.microsoft.FastGelu com.microsoft.Gelu com.microsoft.QuickGelu
"""
# Nonlinear operators that exporters also use in shape arithmetic.
OF_SIZES = "Abs And Ceil Equal Floor Greater GreaterOrEqual Less LessOrEqual Mod Not Or Sqrt Xor"

OPERATORS = (
    *(Operator(name, nonlinear) for name in NONLINEAR.split()),
    *(Operator(name, nonlinear, folds=True) for name in OF_SIZES.split()),
    Operator("Clip", nonlinear, scales=True),
    Operator("Max", nonlinear, folds=True, scales=True),
    Operator("Min", nonlinear, folds=True, scales=True),
    Operator("Tanh", nonlinear, scales=True),
    Operator("Add", add, folds=True, scales=True, rotates=True, adds=True),
    Operator("Sub", add, folds=True, scales=True, rotates=True, adds=True, negates=frozenset([1])),
    Operator("Sum", add, adds=True),
    Operator("Mul", multiply, folds=True, scales=True, rotates=True),
    Operator("Div", divide, folds=True, scales=True, rotates=True),
    Operator("Neg", scale, folds=True, rearranges=True),
    Operator("Identity", scale, view=True, folds=True, passes_sizes=True, rearranges=True),
    Operator("Dropout", scale, random_if=2),
    Operator("Cast", cast, folds=True, passes_sizes=True, rearranges=True),
    Operator("CastLike", cast),
    Operator("Where", where, folds=True, scales=True),
)
