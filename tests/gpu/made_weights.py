"""Made-up weights for models whose data files are missing: seeded random numbers, written to these files."""

from __future__ import annotations

import math
import zlib
from collections import defaultdict
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import numpy.typing as npt
import onnx_ir as ir

# The number of drawn numbers. They are repeated with this period, which no dimension divides.
DRAWN = (1 << 22) + 15
# The standard deviation of weights without a known use, and of the numbers that are added to a norm's scales.
SPREAD = 0.02
# Operators that keep the last two axes of their first input.
KEEPING = {"Cast", "Identity", "Gather", "Unsqueeze", "Squeeze", "Slice", "Split", "Expand"}


def make_missing_weights(path: Path) -> int:
    """Write the missing external data of a model, and return the number of bytes.

    Raises ValueError if some of the weights are not floating point numbers.
    """
    missing: dict[Path, list[ir.Value]] = defaultdict(list)
    for graph in ir.load(path).graphs():
        for value in graph.initializers.values():
            tensor = value.const_value
            if isinstance(tensor, ir.ExternalTensor) and not (path.parent / tensor.location).exists():
                missing[path.parent / tensor.location].append(value)
    for file, values in missing.items():
        aside = file.with_name(file.name + ".part")
        with aside.open("wb") as opened:
            for value in values:
                _write(opened, value)
        aside.rename(file)
    return sum(file.stat().st_size for file in missing)


def _write(file: BinaryIO, value: ir.Value) -> None:
    tensor = value.const_value
    assert isinstance(tensor, ir.ExternalTensor)
    if not tensor.dtype.is_floating_point():
        raise ValueError(f"the weight '{value.name}' is missing, and made-up numbers can't be {tensor.dtype}")
    first = zlib.crc32((value.name or "").encode()) % DRAWN
    file.seek(tensor.offset or 0)
    np.resize(_numbers(*_distribution(value), tensor.dtype)[first : first + DRAWN], tensor.size).tofile(file)


@cache
def _numbers(mean: float, spread: float, dtype: ir.DataType) -> npt.NDArray[Any]:
    """The drawn numbers, twice, so that all of them follow any place in the first half."""
    drawn = np.random.default_rng(0).standard_normal(DRAWN, dtype=np.float32)
    return np.tile((drawn * np.float32(spread) + np.float32(mean)).astype(dtype.numpy()), 2)


def _distribution(value: ir.Value) -> tuple[float, float]:
    """The mean and standard deviation of a weight: products keep the size of their inputs, scales are near 1."""
    assert value.const_value is not None
    shape = value.const_value.shape.numpy()
    if math.prod(shape) == max(shape, default=1):  # a vector
        return (1.0 if _is_scale(value) else 0.0), SPREAD
    terms = _terms(value, shape)
    return 0.0, SPREAD if terms is None else 1 / math.sqrt(terms)


def _is_scale(value: ir.Value) -> bool:
    uses = [(node.op_type, index) for node, index in value.uses()]
    if any(kind == "Mul" or (kind.endswith("Normalization") and index == 1) for kind, index in uses):
        return True
    views = [node.outputs[0] for node, _ in value.uses() if node.op_type in ("Cast", "Reshape", "Unsqueeze")]
    return any(map(_is_scale, views))


def _terms(value: ir.Value, shape: Sequence[int]) -> int | None:
    """The number of terms that a product with the weight sums; None if it is in no product."""
    for node, index in value.uses():
        terms: int | None = None
        if node.op_type == "MatMul":
            terms = shape[-2] if index else shape[-1]
        elif node.op_type == "Gemm" and index < 2:
            transposed = node.attributes.get_int("transB" if index else "transA", 0)
            terms = shape[0] if transposed != index else shape[1]
        elif node.op_type == "Conv":
            terms = math.prod(shape[1:])
        elif node.op_type == "Transpose":
            order = node.attributes.get_ints("perm", tuple(reversed(range(len(shape)))))
            terms = _terms(node.outputs[0], [shape[axis] for axis in order])
        elif node.op_type in KEEPING and len(shape) > 2 - (node.op_type in ("Cast", "Identity")):
            terms = next((found for each in node.outputs if (found := _terms(each, shape)) is not None), None)
        if terms is not None:
            return terms
    return None
