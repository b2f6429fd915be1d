"""Arrays in GPU memory, and the pinned memory that a captured request copies from and to."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

from splitc.runtime.arrays.array import bytes_of

# The address, the shape and the number type of an array.
Place = tuple[int, tuple[int, ...], str]


@dataclass(frozen=True, eq=False)
class GpuArray:
    """An array in a GPU's memory, at the address `pointer`. `owner` keeps the memory alive. `dtype` is numpy's name."""

    pointer: int
    shape: tuple[int, ...]
    dtype: str
    owner: Any

    @property
    def nbytes(self) -> int:
        return bytes_of(self.shape, self.dtype)

    @cached_property
    def place(self) -> Place:
        """Where it is. It has no reference to the memory."""
        return self.pointer, self.shape, self.dtype


@dataclass(eq=False)
class Tape:
    """A rank's buffers for a recorded request.

    - `inputs`: by name, pinned memory that a replay first copies to the GPU, or GPU memory for feeds that are on a GPU.
    - `owned`: pinned memory with the engines' own numbers, which a replay copies too.
    - `kept`: objects that must stay alive until the capture ends.

    All other memory of a graph comes from the GPU's private pool.
    """

    inputs: dict[str, npt.NDArray[Any] | GpuArray] = field(default_factory=dict)
    owned: list[npt.NDArray[np.uint8]] = field(default_factory=list)
    kept: list[Any] = field(default_factory=list)


class Use(Enum):
    """What an engine runs: eager work, the last eager run before a capture, or a run for a capture.

    An engine may have memory for eager runs, and other memory for captured ones. It frees the first after the last
    eager run of a kind of request, and allocates the other in a run that is not captured yet.
    """

    USUAL, LAST, CAPTURED = range(3)
