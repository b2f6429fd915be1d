"""Elements along several axes equal numpy's own indexing, for slices, few runs and many runs."""

from __future__ import annotations

import tracemalloc

import numpy as np

from splitc.compiler.graphs.lazy_tensors import Indices, take


def test_elements_are_those_at_the_indices() -> None:
    for seed in range(200):
        check(np.random.default_rng(seed))


def check(random: np.random.Generator) -> None:
    array = random.integers(0, 99, tuple(random.integers(1, 40, random.integers(1, 4))))
    places: dict[int, Indices] = {}
    expected = array
    for number, length in enumerate(array.shape):
        start, stop = sorted(random.integers(0, length + 1, 2))
        chosen = np.sort(random.choice(length, random.integers(0, length + 1), replace=False))
        runs = np.r_[: length // 4, length // 2 : length // 2 + length // 4]
        place = (slice(start, stop), chosen, runs, None)[random.integers(4)]
        if place is not None:
            places[number] = place
            expected = expected[(slice(None),) * number + (place,)]
    np.testing.assert_array_equal(take(array, places), expected, strict=True)


def test_indices_are_taken_from_the_slice_alone() -> None:
    """Weights are written in pieces of rows: columns of all rows for each piece would be copied in vain."""
    array = np.ones((1 << 12, 1 << 8))
    tracemalloc.start()
    assert take(array, {1: np.array([*range(50), *range(100, 150)]), 0: slice(7, 9)}).shape == (2, 100)
    _, most = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert most < 1 << 16
