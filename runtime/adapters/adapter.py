"""An adapter of low rank: two matrices for each of its modules, whose product is added to a weight."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np

from splitc.runtime.arrays.array import Array
from splitc.runtime.errors import AdapterError

# The largest rank. A choice: files of adapters have up to some hundreds.
MOST_RANK = 1 << 14


@dataclass(frozen=True)
class LowRank:
    """The update of a module's weight: `scale` times B A, with A of [rank, inputs, ...] and B of [outputs, rank, ...].

    - `kernel`: a convolution's kernel sizes: the last axes of its A; its B has as many of size 1.
    - `read_a`, `read_b`: read the arrays from the file, unchanged.
    - `for_slots`: the arrays are made for a model's slots. The slots' own factor is not in the scale.
    """

    module: str
    inputs: int
    outputs: int
    rank: int
    kernel: tuple[int, ...]
    scale: float
    read_a: Callable[[], Array]
    read_b: Callable[[], Array]
    for_slots: bool = False


def read_pair(update: LowRank, name: str) -> tuple[Array, Array]:
    """A and B of an update in single precision, read from the file of the adapter `name`.

    Raises AdapterError for numbers that are not finite.
    """
    a, b = update.read_a(), update.read_b()
    with np.errstate(over="ignore"):
        a, b = a.astype(np.float32), b.astype(np.float32)
    if not (np.isfinite(a).all() and np.isfinite(b).all()):
        raise AdapterError(
            f"the adapter {name} has numbers for '{update.module}' that are not finite in float32: its file is "
            "damaged, or its training failed"
        )
    return a, b


@dataclass(frozen=True)
class Adapter:
    """An adapter's file, and its updates by the names that it has for modules. `name` is for messages."""

    name: str
    updates: Mapping[str, LowRank]
