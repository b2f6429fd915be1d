"""The layout of an engine's weights in a GPU's memory, where sessions do not allocate them themselves."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import accumulate

from msgspec import Struct

from splitc.runtime.arrays.array import bytes_of
from splitc.runtime.package.manifest import Rank, Weight

# Arrays begin at multiples of this many bytes, as in memory that CUDA gives.
ALIGNED = 512
# Number types that CuPy passes on by DLPack, and bfloat16, which DLPack has, but not CuPy.
PASSED_ON = frozenset(
    [
        "float16",
        "float32",
        "float64",
        "int8",
        "int16",
        "int32",
        "int64",
        "uint8",
        "uint16",
        "uint32",
        "uint64",
        "bfloat16",
    ]
)


class SwapBuffer(Struct, frozen=True, array_like=True):
    """Memory of a device, of so many bytes, for the weights of whichever model of a pipeline is at work.

    `pipeline` is the pipeline's number in the caller's process.
    """

    pipeline: int
    bytes: int


def can_share(weights: Sequence[Weight] | None) -> bool:
    """Whether sessions can share an engine's weights: they are known, and of types that can be passed on."""
    return weights is not None and all(weight.dtype in PASSED_ON for weight in weights)


def size_of(weight: Weight) -> int:
    """The bytes of a weight."""
    return bytes_of(tuple(weight.shape), weight.dtype)


def lay_out(sizes: Iterable[int]) -> tuple[list[int], int]:
    """Where arrays of these bytes begin in one piece of memory, and the bytes of that."""
    ends = list(accumulate((-(-size // ALIGNED) * ALIGNED for size in sizes), initial=0))
    return ends[:-1], max(ALIGNED, ends[-1])


def swappable_bytes(rank: Rank) -> int:
    """The bytes of a rank's weights that can be swapped: those of a single engine; 0 if they can't be."""
    weights = rank.engines[0].weights if len(rank.engines) == 1 else None
    return lay_out(map(size_of, weights))[1] if weights and can_share(weights) else 0
