"""Arrays in GPUs' memory, and the host's memory that a captured request copies them from and to."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import numpy.typing as npt

from splitc.runtime.arrays import number_type


@dataclass(frozen=True, eq=False)
class GpuArray:
    """An array in a GPU's memory at the address `pointer`, which `owner` keeps. `dtype` is numpy's name."""

    pointer: int
    shape: tuple[int, ...]
    dtype: str
    owner: Any

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * number_type(self.dtype).itemsize


@dataclass(eq=False)
class Tape:
    """A rank's part of a recorded request: memory on the host that is copied to the GPU when the request begins, and
    from it when it ends, by the names of inputs and outputs. What is `kept` is needed until all is captured: whatever
    else a graph uses is the GPU's private memory, which no one else gets.
    """

    inputs: dict[str, npt.NDArray[Any]] = field(default_factory=dict)
    outputs: dict[str, npt.NDArray[Any]] = field(default_factory=dict)
    kept: list[Any] = field(default_factory=list)
