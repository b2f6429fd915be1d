"""Units for ranks by their shares, with remainders carried over."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import onnx_ir as ir
import pytest

from splitc.compiler.operators.axes import Factor
from splitc.compiler.sharding.shares import assign_units, largest_remainder, multiple_of


def factors(*sizes: int) -> dict[Factor, dict[ir.Value, int]]:
    """Factors of these sizes, each with a weight of one byte a unit."""
    return {Factor(size): {ir.Value(name="weight"): size} for size in sizes}


def counts(sizes: Sequence[int], shares: Sequence[float]) -> list[list[int]]:
    found = assign_units(factors(*sizes), [shares])
    return [[each.size if each.owned else 0 for each in ranges] for ranges in found.values()]


def test_units_follow_the_shares() -> None:
    assert counts([8], [3, 1]) == [[6, 2]]
    assert counts([8], [3, 2, 1]) == [[4, 3, 1]]


def test_what_one_gets_too_much_is_made_up_for_later() -> None:
    """Eight heads on three ranks, layer after layer: no rank always has the fewest."""
    found = np.array(counts([8] * 6, [1, 1, 1]))
    assert (found.sum(axis=1) == 8).all()
    assert np.ptp(found.sum(axis=0)) <= 1
    assert np.ptp(found, axis=1).max() == 1


@pytest.mark.parametrize("seed", range(20))
def test_total_keeps_to_the_shares(seed: int) -> None:
    generator = np.random.default_rng(seed)
    shares = generator.uniform(0.5, 3, generator.integers(2, 6))
    sizes = generator.integers(len(shares), 40, 30)
    found = np.array(counts(sizes.tolist(), shares.tolist()))
    wanted = sizes.sum() * shares / shares.sum()
    assert (found.sum(axis=1) == sizes).all()
    assert np.abs(found.sum(axis=0) - wanted).max() < 3


def test_fewer_units_than_ranks_leave_some_with_none() -> None:
    assert counts([2], [1, 1, 1]) == [[1, 0, 1]] or counts([2], [1, 1, 1]) == [[1, 1, 0]]


@pytest.mark.parametrize(("ranks", "expected"), [(3, [(0, 4), (0, 2), (2, 4)]), (4, [(0, 2), (2, 4), (0, 2), (2, 4)])])
def test_ranks_that_share_a_unit_divide_what_is_inside(ranks: int, expected: list[tuple[int, int]]) -> None:
    weights = factors(2, 4)
    outer, inner = weights
    ranges = assign_units(weights, [[1.0] * ranks], partners={outer: inner})
    pairs = list(zip(ranges[outer], ranges[inner]))
    covered = {(u, g) for a, b in pairs for u in range(a.start, a.stop) for g in range(b.start, b.stop)}
    assert covered == {(u, g) for u in range(2) for g in range(4)}
    assert sum(a.size * b.size for a, b in pairs) == 8
    assert sorted((r.start, r.stop) for r in ranges[inner]) == sorted(expected)


def test_largest_remainder_goes_by_what_is_owed() -> None:
    assert largest_remainder([1.25, 1.5, 1.25], 4) == [1, 2, 1]
    assert largest_remainder([1.25, 1.5, 1.25], 4, [0.0, 0.0, 1.0]) == [1, 1, 2]


@pytest.mark.parametrize(("units", "expected"), [(14336, 16), (256, 4), (4306, 2), (4305, 1), (32, 1)])
def test_wide_axes_are_divided_in_multiples(units: int, expected: int) -> None:
    assert multiple_of(units) == expected
    for ranks in (counts([units], [1.02, 0.98]), counts([units], [3.0, 2.0, 2.1])):
        assert sum(*ranks) == units
        assert all(count % expected == 0 for count in ranks[0])
