"""Fourier transforms, and other operators along the time axis of a signal."""

from __future__ import annotations

from splitc.compiler.operators.operation import LINEAR, Operation
from splitc.compiler.operators.operator import Operator


def fourier(op: Operation) -> None:
    """All axes are the same except the transformed one and the last one, which has real and imaginary parts.

    The default axis is 1 in opset 17, and the last but one in opset 20: if none is given, both are whole.
    """
    rank, named = len(op.input(0)), op.numbers(2)
    if named is None and op.has(2):
        return
    axes = named or ([op.number("axis", 1)] if "axis" in op.node.attributes else [1, -2])
    op.relate_others([rank - 1, *(axis % rank for axis in axes)])
    op.linear = LINEAR


def short_time_fourier(op: Operation) -> None:
    """Signals are independent."""
    op.relate(op.input(0)[0], op.output()[0])
    op.linear = LINEAR


def reverse_sequence(op: Operation) -> None:
    """Rows are reversed independently, each up to its own length."""
    rank = len(op.input(0))
    op.relate_others([op.number("time_axis", 0) % rank])
    op.relate(op.input(1)[0], op.output()[op.number("batch_axis", 1) % rank])


OPERATORS = (
    Operator("DFT", fourier),
    Operator("STFT", short_time_fourier),
    Operator("ReverseSequence", reverse_sequence),
)
