"""The layout of an engine's weights in GPU memory that sessions do not allocate themselves."""

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
        *("float16", "float32", "float64", "bfloat16"),
        *(f"{kind}{bits}" for kind in ("int", "uint") for bits in (8, 16, 32, 64)),
    ]
)


class SwapBuffer(Struct, frozen=True, array_like=True):
    """A device buffer of this many bytes for the weights of the pipeline's model that is at work.

    `pipeline` is the pipeline's number in the caller's process.
    """

    pipeline: int
    bytes: int


def can_share(weights: Sequence[Weight] | None) -> bool:
    """Whether sessions can share an engine's weights: they are listed, and DLPack can pass their types."""
    return weights is not None and all(weight.dtype in PASSED_ON for weight in weights)


def size_of(weight: Weight) -> int:
    """The bytes of a weight."""
    return bytes_of(tuple(weight.shape), weight.dtype)


def lay_out(sizes: Iterable[int]) -> tuple[list[int], int]:
    """The offsets of arrays of these sizes in one allocation, and its bytes."""
    ends = list(accumulate((-(-size // ALIGNED) * ALIGNED for size in sizes), initial=0))
    return ends[:-1], max(ALIGNED, ends[-1])


def swappable_bytes(rank: Rank) -> int:
    """The bytes of a rank's swappable weights: those of a single engine; 0 if they can't be swapped."""
    weights = rank.engines[0].weights if len(rank.engines) == 1 else None
    return lay_out(map(size_of, weights))[1] if weights and can_share(weights) else 0
