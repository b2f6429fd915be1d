"""Made-up data for a node that is tried, which its operator accepts."""

from __future__ import annotations

import zlib

import numpy as np
import onnx_ir as ir

from splitc.compiler.operators import axes as ax
from splitc.compiler.operators.operation import Operation
from splitc.compiler.operators.registry import operator_of
from splitc.runtime.arrays.array import Array

# The scale of quantized numbers, and the largest quantized number: sums do not saturate.
SCALE, LARGEST = 0.37, 3
# The largest integer that is a sum of the ranks' parts. A choice: it fits into 8 bits, and is more than the parts.
LARGEST_SUM = 50
# The distance of random half-precision numbers. A choice: differences of numbers up to 8 have 11 bits.
STEP = 1 / 64


def made_up(operation: Operation, number: int, shape: tuple[int, ...], dtype: ir.DataType, seed: str) -> Array:
    """Data for an input, by its type and its meaning to the operator. Equal for equal seeds."""
    example = operator_of(operation.node).example_input
    if example is not None and (array := example(operation, number)) is not None:
        return np.full(shape, array, dtype.numpy())
    generator = np.random.default_rng(zlib.crc32(f"{seed}/{number}".encode()))
    if dtype.is_floating_point():
        if not shape or shape == (1,):
            return np.full(shape, SCALE, dtype.numpy())
        return generator.standard_normal(shape).astype(dtype.numpy())
    if dtype == ir.DataType.BOOL:
        return generator.integers(0, 2, shape).astype(np.bool_)
    if dtype == ir.DataType.STRING:  # numbers, since a Cast may read them
        return generator.integers(0, LARGEST + 1, shape).astype(str).astype(object)
    if dtype.bitwidth <= 8:
        return generator.integers(-LARGEST if dtype.is_signed() else 0, LARGEST + 1, shape).astype(dtype.numpy())
    for index, table in operator_of(operation.node).lookups:
        if index == number and operation.has(table):
            rows = ax.size_of(operation.input(table)[operation.number("axis", 0)])
            return np.resize(generator.permutation(rows), shape).astype(dtype.numpy())
    # Zeros and ones are valid as indices, lengths and flags; a single one is 1, since it may be a divisor or a length.
    return (
        np.ones(shape, dtype.numpy()) if np.prod(shape) <= 1 else generator.integers(0, 2, shape).astype(dtype.numpy())
    )


def made_up_sum(shape: tuple[int, ...], dtype: ir.DataType, seed: str) -> Array:
    """Data for an input that is a sum of the ranks' parts: numbers of any size, so that rounding shows."""
    generator = np.random.default_rng(zlib.crc32(f"{seed}/sum".encode()))
    if dtype.is_floating_point():
        return _normal(generator, shape, np.dtype(dtype.numpy()))
    return generator.integers(-LARGEST_SUM if dtype.is_signed() else 0, LARGEST_SUM, shape).astype(dtype.numpy())


def parts_of(array: Array, seed: str) -> list[Array]:
    """Three random parts that add up to the array. The second is zero, as on a rank without units."""
    generator = np.random.default_rng(zlib.crc32(seed.encode()))
    if array.dtype.kind in "iub":
        first = generator.integers(0, LARGEST + 1, array.shape).astype(array.dtype)
    else:
        first = _normal(generator, array.shape, array.dtype)
    return [first, np.zeros_like(array), array - first]


def _normal(generator: np.random.Generator, shape: tuple[int, ...], dtype: np.dtype) -> Array:
    """Random numbers. Those of 16 bits are multiples of STEP, so that differences are exact.

    Else a sum in float32 of parts in halves would differ from the rounded whole.
    """
    numbers = generator.standard_normal(shape)
    return (np.round(numbers / STEP) * STEP if dtype.itemsize == 2 else numbers).astype(dtype)
