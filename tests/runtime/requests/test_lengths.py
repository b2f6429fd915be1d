"""The ranks' inputs for caches that are written in place."""

from __future__ import annotations

import numpy as np
import pytest

from splitc.runtime.errors import FeedError
from splitc.runtime.package.states import Length
from splitc.runtime.requests.added_feeds import with_lengths

LENGTH = Length("n", ["key", "value"], axis=2, reads=("ids", 1), by_branch=True)


def feeds(batch: int, new: int, past: int) -> dict[str, np.ndarray]:
    caches = {name: np.ones((batch, 2, past, 3), np.float32) for name in ("key", "value")}
    return {"ids": np.zeros((batch, new), np.int64), **caches}


@pytest.mark.parametrize(("batch", "new", "past"), [(1, 4, 5), (2, 1, 5), (2, 4, 0)])
def test_the_length_is_a_size_of_no_bytes(batch: int, new: int, past: int) -> None:
    given = feeds(batch, new, past)
    made = with_lengths([LENGTH], given)
    assert made["n"].shape == (past, 0)
    assert all(made[name] is given[name] for name in given)


def test_rows_that_are_read_again_have_a_branch() -> None:
    given = feeds(2, 4, 5)
    made = with_lengths([LENGTH], given)
    assert made["n"].shape == (5, 1)
    assert all(made[name] is given[name] for name in given)


def test_pasts_of_unlike_lengths_are_refused() -> None:
    given = {**feeds(1, 1, 5), "value": np.ones((1, 2, 4, 3), np.float32)}
    with pytest.raises(FeedError, match=r"'key' has 5 rows and 'value' 4: .* \(with --no-fuse"):
        with_lengths([LENGTH], given)


@pytest.mark.parametrize(("batch", "new"), [(0, 1), (2, 0)])
def test_requests_of_nothing_are_refused(batch: int, new: int) -> None:
    """ONNX Runtime's operator divides by zero without rows, which ends the process."""
    with pytest.raises(FeedError, match=rf"{new} tokens in {batch} rows.* --no-fuse"):
        with_lengths([LENGTH], feeds(batch, new, 5))
