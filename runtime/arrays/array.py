"""Arrays: number types that numpy lacks, reductions, zeros that are allocated later."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]
# Gives arrays of these shapes and types, by name.
Allocate = Callable[[Mapping[str, tuple[tuple[int, ...], np.dtype[Any]]]], dict[str, Array]]

# What reduces two arrays, by the operation of a Reduce step.
OPERATIONS: dict[str, np.ufunc] = {"sum": np.add, "max": np.maximum}


@cache
def number_type(name: str) -> np.dtype[Any]:
    """The numpy type of this name; bfloat16, float8 and others come from ml_dtypes."""
    try:
        known: np.dtype[Any] = np.dtype(name)
    except TypeError:
        import ml_dtypes

        known = np.dtype(getattr(ml_dtypes, name))
    return known


def bytes_of(shape: Sequence[int], dtype: str) -> int:
    """The bytes of an array. `dtype` is numpy's name."""
    return math.prod(shape) * number_type(dtype).itemsize


@dataclass(frozen=True)
class Zeros:
    """An array of zeros that is not allocated yet. `dtype` is numpy's name."""

    shape: tuple[int, ...]
    dtype: str
