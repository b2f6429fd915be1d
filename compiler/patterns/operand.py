"""Operands of products, traced back through transposes, reshapes and constant factors."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import dataclass, replace

import onnx_ir as ir

from splitc.compiler.graphs.matching import VIEWS, constant, filled_with, is_onnx, made_by, only_user, value_before
from splitc.compiler.operators.gpu_kernels import FLOATS, HALVES
from splitc.compiler.patterns.errors import NO_SIZES, NotFusedError
from splitc.compiler.patterns.sizes import Axis, Sizes, fixed_axis

PASSED = frozenset({"Cast"})
ARITHMETIC = {"Add": operator.add, "Sub": operator.sub, "Mul": operator.mul}
# Transposes [batch, heads, rows, size] to [batch, rows, heads, size], and back.
SWAP_HEADS = (0, 2, 1, 3)
# In place of an axis of the value: an axis of one element that it lacks.
ADDED = -1


@dataclass(frozen=True)
class Operand:
    """`factor` x `value`, transposed: the operand's axis n is axis `axes[n]` of the value, or ADDED."""

    value: ir.Value
    axes: tuple[int, ...]
    factor: float = 1.0

    def transposed(self, order: Sequence[int]) -> Operand:
        """The operand with its axes permuted, as by a Transpose."""
        return replace(self, axes=tuple(self.axes[axis] for axis in order))

    def swapped(self) -> Operand:
        """The operand with its last two axes swapped."""
        return replace(self, axes=(*self.axes[:-2], self.axes[-1], self.axes[-2]))

    @property
    def is_value(self) -> bool:
        """Whether the axes are in the value's own order."""
        return self.axes == tuple(range(len(self.axes)))


def as_operand(value: ir.Value, rank: int, factor: float = 1.0) -> Operand:
    """The operand that is a value of this rank, not transposed, times a factor."""
    return Operand(value, tuple(range(rank)), factor)


def untransposed(value: ir.Value, rank: int) -> Operand:
    """A value of this rank as a transpose of the first value above that is no result of a Transpose."""
    return traced_back(as_operand(value, rank))


def in_half_precision(operand: Operand, scaled: bool = False) -> Operand | None:
    """An operand before its cast from float16 or bfloat16; the operand itself if it has such a type; else None."""
    if operand.value.dtype in HALVES:
        return operand
    traced = traced_back(operand, scaled)
    source = half_source(traced.value)
    return None if source is None else replace(traced, value=source)


def half_source(value: ir.Value) -> ir.Value | None:
    """The value in half precision that a wider one is cast from; None if it is not."""
    source = None if value.dtype in HALVES else value_before(value, "Cast")
    return source if source is not None and source.dtype in HALVES else None


def half_result(value: ir.Value) -> ir.Value | None:
    """The value in half precision that a wider one is cast to, if that is its only use; else None."""
    cast = None if value.dtype in HALVES else only_user(value, "Cast")
    return None if cast is None or cast.outputs[0].dtype not in HALVES else cast.outputs[0]


def traced_back(operand: Operand, scaled: bool = False) -> Operand:
    """The same operand of an earlier value: the first one above that is no result of a Transpose.

    If `scaled`, also no product with a constant: `factor` then includes the constants.
    """
    while (node := operand.value.producer()) is not None and not node.domain:
        source = node.inputs[0] if node.inputs else None
        if node.op_type == "Transpose":
            first = node.attributes.get_ints("perm", tuple(reversed(range(max(operand.axes) + 1))))
            operand = replace(operand, axes=tuple(ADDED if axis == ADDED else first[axis] for axis in operand.axes))
        elif scaled and (product := factor_of(node)) is not None:
            source = product[0]
            operand = replace(operand, factor=operand.factor * product[1])
        else:
            break
        assert source is not None
        operand = replace(operand, value=source)
    return operand


def traced_back_merged(operand: Operand, sizes: Sizes, scaled: bool = False) -> Operand:
    """As `traced_back`, and through a Transpose of the last two axes between reshapes that merge leading axes.

    Torch's exporters transpose keys so: reshaped to three axes and back.
    """
    while True:
        operand = traced_back(operand, scaled)
        before = _before_transpose(operand.value, sizes)
        if before is None:
            return operand
        last = len(operand.axes) - operand.axes.count(ADDED) - 1
        swapped = {last: last - 1, last - 1: last}
        operand = replace(operand, value=before, axes=tuple(swapped.get(axis, axis) for axis in operand.axes))


def _before_transpose(value: ir.Value, sizes: Sizes) -> ir.Value | None:
    """The value before a Reshape, a Transpose of the last two axes and a Reshape; None for any other nodes.

    Together they keep its leading axes.
    """
    chain = []
    source: ir.Value | None = value
    for kinds in (VIEWS, {"Transpose"}, VIEWS):
        node = made_by(source, *kinds)
        if node is None:
            return None
        chain.append(node)
        source = node.inputs[0]
    order = chain[1].attributes.get_ints("perm", ())
    count = len(order)
    own, before = sizes.of(value), None if source is None else sizes.of(source)
    middle = None if chain[1].inputs[0] is None else sizes.of(chain[1].inputs[0])
    if tuple(order) != (*range(count - 2), count - 1, count - 2) or own is None or before is None or middle is None:
        return None
    kept = own[:-2] == before[:-2] and own[-2:] == before[:-3:-1] and middle[-2:] == before[-2:]
    return source if kept else None


def unmerged(operand: Operand, sizes: Sizes, scaled: bool) -> Operand | None:
    """An operand before the Reshape that merges its leading axes; None if there is none."""
    rank = len(operand.axes)
    if operand.axes[:-2] != tuple(range(rank - 2)):
        return None
    axes, value = sizes.of(operand.value), operand.value
    while (source := value_before(value, *VIEWS)) is not None:
        value, above = source, sizes.of(source)
        if axes is None or above is None or len(above) <= rank or above[-2:] != axes[-2:]:
            continue
        more = len(above) - rank
        order = (*range(len(above) - 2), *(axis + more for axis in operand.axes[-2:]))
        return traced_back(replace(operand, value=value, axes=order), scaled)
    return None


def axes_of(operand: Operand, sizes: Sizes) -> tuple[Axis, ...]:
    """An operand's axes. Raises NotFusedError if their sizes are not known."""
    axes = sizes.axes(operand.value)
    if axes is None or len(axes) != len(operand.axes) - operand.axes.count(ADDED):
        raise NotFusedError(NO_SIZES)
    return tuple(fixed_axis(1) if axis == ADDED else axes[axis] for axis in operand.axes)


def factor_of(node: ir.Node | None) -> tuple[ir.Value, float] | None:
    """The value that a Mul or Div scales by a constant, and that constant factor; None for any other node."""
    if not is_onnx(node, "Mul", "Div"):
        return None
    one, other = node.inputs
    if node.op_type == "Mul" and constant(one) is not None:
        one, other = other, one
    number = constant(other)
    if one is None or not number or constant(one) is not None:
        return None
    return one, number if node.op_type == "Mul" else 1 / number


def same_number(value: ir.Value | None) -> float | None:
    """The number that all elements of a value are, in every request; None if they differ, or if that is not known."""
    number, node = constant(value), None if value is None else value.producer()
    if number is not None or node is None or node.domain:
        return number
    if node.op_type == "ConstantOfShape":
        return float(filled_with(node))
    if node.op_type in VIEWS | PASSED | {"Expand"}:
        keeps = node.op_type != "Cast" or (value is not None and value.dtype in FLOATS | HALVES)
        return same_number(node.inputs[0]) if keeps else None
    if node.op_type not in ARITHMETIC:
        return None
    one, other = map(same_number, node.inputs)
    return None if one is None or other is None else ARITHMETIC[node.op_type](one, other)
