"""How many rows of the caches that are written in place are filled: the ranks take it as the size of an input."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from splitc.runtime.arrays.array import Array
from splitc.runtime.errors import FeedError
from splitc.runtime.feeds.on_gpu import Feed
from splitc.runtime.package.manifest import Length


def fed_lengths(lengths: Sequence[Length], feeds: Mapping[str, Feed]) -> dict[str, Array]:
    """The ranks' inputs for the lengths of the pasts that a request is fed with.

    Raises FeedError for pasts that are not as long as others, and for a request that the engines can't run.
    """
    made = {}
    for length in lengths:
        filled = filled_rows(length, feeds)
        check_rows(feeds[length.states[0]].shape[0], added(length, feeds), filled)
        made[length.input] = as_size(filled)
    return made


def filled_rows(length: Length, pasts: Mapping[str, Feed]) -> int:
    """The rows of pasts. Raises FeedError if one is not as long as others."""
    first, *others = length.states
    filled = pasts[first].shape[length.axis]
    for name in others:
        if (rows := pasts[name].shape[length.axis]) != filled:
            raise FeedError(
                f"'{first}' has {filled} rows and '{name}' {rows}: this package takes caches of one length "
                "(--no-fuse compiles one that does not)"
            )
    return filled


def as_size(filled: int) -> Array:
    """An array of so many elements, which nobody reads."""
    return np.zeros(filled, np.bool_)


def added(length: Length, feeds: Mapping[str, Feed]) -> int:
    """How many rows a request adds."""
    if length.reads is None:
        return length.adds
    name, axis = length.reads
    return feeds[name].shape[axis]


def check_rows(batch: int, new: int, filled: int) -> None:
    """Raise FeedError for several tokens in each of several rows after others, which the engines' operator refuses."""
    if batch > 1 and new > 1 and filled > 0:
        raise FeedError(
            f"{batch} rows can't read {new} tokens each after {filled} others, since this package writes its caches in "
            "place: read one token at a time, run each row by itself, or compile with --no-fuse"
        )
