"""Operators that work element by element, with broadcasting."""

from __future__ import annotations

from splitc.compiler.operators import rule
from splitc.compiler.operators.operation import Operation


def elementwise(op: Operation) -> None:
    """Every input is broadcast to the outputs."""
    for number in range(len(op.inputs)):
        if op.has(number):
            op.broadcast(op.input(number), op.output())
    for number in range(1, len(op.outputs)):
        if op.has_output(number):
            op.broadcast(op.output(number), op.output())


@rule(
    *"""
    Abs Acos Acosh And Asin Asinh Atan Atanh BitShift BitwiseAnd BitwiseNot BitwiseOr BitwiseXor Ceil Celu Clip Cos
    Cosh Elu Equal Erf Exp Floor Gelu Greater GreaterOrEqual HardSigmoid HardSwish IsInf IsNaN LeakyRelu Less
    LessOrEqual Log Max Mean Min Mish Mod Not Or PRelu Pow Reciprocal Relu Round Selu Shrink Sigmoid Sign Sin Sinh
    Softplus Softsign Sqrt Swish Tan Tanh ThresholdedRelu Xor
    com.microsoft.BiasGelu com.microsoft.FastGelu com.microsoft.Gelu com.microsoft.QuickGelu
    """.split()  # noqa: SIM905  # as a list it would take a page
)
def nonlinear(op: Operation) -> None:
    elementwise(op)


@rule("Add", "Sub", "Sum")
def add(op: Operation) -> None:
    elementwise(op)
    op.linear = (frozenset(range(len(op.inputs))),)
    op.once = frozenset(range(len(op.inputs)))


@rule("Mul")
def multiply(op: Operation) -> None:
    elementwise(op)
    op.linear = (frozenset([0]), frozenset([1]))


@rule("Div", "Neg", "Identity", "Dropout")
def scale(op: Operation) -> None:
    elementwise(op)
    op.linear = (frozenset([0]),)


@rule("Cast", "CastLike")
def cast(op: Operation) -> None:
    """Rounding a sum's parts to floating point is what any sum does; to whole numbers it is not."""
    source, target = op.node.inputs[0], op.node.outputs[0]
    op.relate_all(op.input(0), op.output())
    if op.has(1):
        op.free(op.input(1))
    if source is not None and target.dtype is not None and target.dtype.is_floating_point():
        op.linear = (frozenset([0]),)


@rule("Where")
def where(op: Operation) -> None:
    elementwise(op)
    op.linear = (frozenset([1, 2]),)
