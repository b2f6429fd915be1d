"""The number of rows for each of several groups, and their part of the arrays."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from splitc.runtime.arrays.array import Zeros
from splitc.runtime.errors import FeedError
from splitc.runtime.feeds.rows import count_rows, cut_batches, cut_rows, share_rows


@pytest.mark.parametrize(
    ("rows", "shares", "counts"),
    [
        (4, [1, 1], [2, 2]),
        (5, [1, 1], [3, 2]),
        (7, [1, 1, 1], [3, 2, 2]),
        (2, [1, 1, 1], [1, 1, 0]),
        (4, [3, 1], [3, 1]),
        (2, [3, 1], [2, 0]),
        (1, [1, 3], [0, 1]),
        (0, [3, 1], [0, 0]),
    ],
)
def test_rows_are_divided_by_shares(rows: int, shares: list[float], counts: list[int]) -> None:
    assert share_rows(rows, shares) == counts


def test_who_is_free_goes_first() -> None:
    assert share_rows(3, [1, 1], [1, 0]) == [1, 2]


@given(st.integers(0, 9), st.lists(st.floats(0.1, 10), min_size=1, max_size=3))
def test_no_other_division_ends_sooner(rows: int, shares: list[float]) -> None:
    counts = share_rows(rows, shares)
    assert sum(counts) == rows

    def slowest(division: tuple[int, ...]) -> float:
        return max(count / share for count, share in zip(division, shares, strict=True))

    others = (own for own in itertools.product(range(rows + 1), repeat=len(shares)) if sum(own) == rows)
    assert slowest(tuple(counts)) <= min(map(slowest, others)) * (1 + 1e-9)


def test_rows_lie_along_any_axis_and_what_has_none_stays_whole() -> None:
    arrays = {"a": np.arange(12).reshape(4, 3), "b": np.arange(8).reshape(2, 4), "table": np.arange(5)}
    axes = {"a": 0, "b": 1, "states": 1}
    assert count_rows({**arrays, "states": Zeros((3, 4, 2), "float32")}, axes) == 4
    one = {**arrays, "b": np.zeros((2, 1))}
    assert count_rows(one, axes) is None
    assert count_rows(one, axes, ["b"]) is None
    assert count_rows(one, axes, ["a"]) == 4, "one row stands for all"
    assert cut_rows(one, axes, 4, 1, 3)["b"] is one["b"]
    assert [batch["b"] is one["b"] for batch in cut_batches(one, axes, 3, ["a"])] == [True, True]
    with pytest.raises(FeedError, match="batches of different lengths"):
        cut_batches(one, axes, 3)
    cut = cut_rows(arrays, axes, 4, 1, 3)
    assert cut["a"].tolist() == [[3, 4, 5], [6, 7, 8]]
    assert cut["b"].tolist() == [[1, 2], [5, 6]]
    assert cut["b"].flags.c_contiguous
    assert cut["table"] is arrays["table"]
    assert cut_rows({"states": Zeros((3, 4, 2), "float32")}, axes, 4, 1, 3) == {"states": Zeros((3, 2, 2), "float32")}
