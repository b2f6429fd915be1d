"""What a product multiplies, seen through what can be done elsewhere: transposes, and factors that are constants."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import onnx_ir as ir

from splitc.compiler.frontend.optional import source_of


@dataclass(frozen=True)
class Operand:
    """`factor` x `value`, with the axes in the order `axes`: axis n is axis `axes[n]` of the value."""

    value: ir.Value
    axes: tuple[int, ...]
    factor: float = 1.0

    def transposed(self, order: Sequence[int]) -> Operand:
        """With the axes in another order."""
        return replace(self, axes=tuple(self.axes[axis] for axis in order))

    @property
    def is_value(self) -> bool:
        """Whether the axes are in the value's own order."""
        return self.axes == tuple(range(len(self.axes)))


def find_operand(value: ir.Value, rank: int, scaled: bool) -> Operand:
    """A value of so many axes as an operand of the first value above it that is made in another way.

    Only one that may be `scaled` gets a factor other than 1.
    """
    operand = Operand(value, tuple(range(rank)))
    while (node := operand.value.producer()) is not None and not node.domain:
        if node.op_type == "Transpose":
            first = node.attributes.get_ints("perm", tuple(reversed(range(rank))))
            source = node.inputs[0]
            axes = tuple(first[axis] for axis in operand.axes)
        elif scaled and node.op_type in ("Mul", "Div") and (product := factor_of(node)) is not None:
            source, axes = product[0], operand.axes
            operand = replace(operand, factor=operand.factor * product[1])
        else:
            break
        assert source is not None
        operand = replace(operand, value=source, axes=axes)
    return operand


def factor_of(node: ir.Node) -> tuple[ir.Value, float] | None:
    """Of a Mul or Div by a constant number, what is multiplied, and by which number; None if it is by no such."""
    one, other = node.inputs
    if node.op_type == "Mul" and constant(one) is not None:
        one, other = other, one
    number = constant(other)
    if one is None or not number or constant(one) is not None:
        return None
    return one, number if node.op_type == "Mul" else 1 / number


def constant(value: ir.Value | None) -> float | None:
    """The number that a scalar constant is; None for any other value. A request may override an optional input."""
    if value is None or value.const_value is None or value.const_value.size != 1 or source_of(value) is not None:
        return None
    return float(value.const_value.numpy().reshape(()))
