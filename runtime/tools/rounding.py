"""How much rounding alone changes the unsplit model's outputs: a split model may differ about as much."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np

from splitc.runtime.tools.compare import Difference
from splitc.runtime.tools.unsplit import Arrays

# How much farther off than rounding moved the unsplit model's outputs, in a few tries, the split model's may be.
# A choice: the few tries do not find the most that rounding can do. Twice is still far below what a wrong rule does.
ROUNDING = 2
# The number types of inputs of which numpy knows the next number.
NUDGED = (np.dtype(np.float16), np.dtype(np.float32), np.dtype(np.float64))


def own_moves(own: Sequence[Sequence[Difference]]) -> dict[str, float]:
    """The largest relative change of each output in some runs of the unsplit model."""
    known: dict[str, float] = {}
    for difference in (difference for run in own for difference in run if difference.problem is None):
        known[difference.name] = max(difference.relative, known.get(difference.name, 0.0))
    return known


def excuse(differences: Sequence[Difference], own: Sequence[Sequence[Difference]]) -> list[Difference]:
    """The differences, passed where the unsplit model's `own` outputs change about as much."""
    known = own_moves(own)
    return [replace(d, passed=d.passed or d.relative <= ROUNDING * known.get(d.name, 0.0)) for d in differences]


def nudged(feeds: Arrays) -> Iterator[Arrays]:
    """The feeds with all numbers of floating point a step up, and a step down; nothing if there are none."""
    if any(array.dtype in NUDGED for array in feeds.values()):
        for end in (np.inf, -np.inf):
            yield {
                name: np.nextafter(array, array.dtype.type(end)) if array.dtype in NUDGED else array
                for name, array in feeds.items()
            }
