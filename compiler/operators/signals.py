"""Fourier transforms, and other operators along the time of a signal."""

from __future__ import annotations

from splitc.compiler.operators.operation import Operation
from splitc.compiler.operators.operator import Operator

LINEAR = (frozenset([0]),)


def fourier(op: Operation) -> None:
    """All axes but the transformed one, and the last one, of real and imaginary parts, are the same.

    Without an axis it is 1 by opset 17, and the one before the last by opset 20: both are whole.
    """
    data, output = op.input(0), op.output()
    named = op.numbers(2)
    if named is None and op.has(2):
        return
    axes = named or ([op.number("axis", 1)] if "axis" in op.node.attributes else [1, -2])
    transformed = {axis % len(data) for axis in axes}
    kept = [number for number in range(len(data) - 1) if number not in transformed]
    op.relate_all([data[number] for number in kept], [output[number] for number in kept])
    op.linear = LINEAR


def short_time_fourier(op: Operation) -> None:
    """Signals are apart."""
    op.relate(op.input(0)[0], op.output()[0])
    op.linear = LINEAR


def reverse_sequence(op: Operation) -> None:
    """Each row is reversed up to its own length."""
    data, output = op.input(0), op.output()
    time = op.number("time_axis", 0) % len(data)
    for number, (source, target) in enumerate(zip(data, output, strict=True)):
        if number != time:
            op.relate(source, target)
    op.relate(op.input(1)[0], output[op.number("batch_axis", 1) % len(data)])


OPERATORS = (
    Operator("DFT", fourier),
    Operator("STFT", short_time_fourier),
    Operator("ReverseSequence", reverse_sequence),
)
