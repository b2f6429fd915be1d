"""Rows of a batch: how many each of several takes, and their part of each array."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import TypeVar

import numpy as np

from splitc.runtime.arrays.array import Array, Zeros
from splitc.runtime.feeds.on_gpu import Feed, on_host

T = TypeVar("T", Array, Feed, Array | Zeros)


def count_rows(
    arrays: Mapping[str, Feed | Zeros], axes: Mapping[str, int], sources: Collection[str] = ()
) -> int | None:
    """The rows that arrays have along their row axis (`axes`); None if they differ, or none has rows.

    One row may stand for all, but in the `sources`.
    """
    lengths = {name: array.shape[axes[name]] for name, array in arrays.items() if name in axes}
    rows = max(lengths.values(), default=None)
    if rows is None or not set(lengths.values()) <= {1, rows}:
        return None
    is_one_for_all = len(set(lengths.values())) > 1
    has_sources = bool(sources) and all(lengths.get(name, rows) == rows for name in sources)
    return rows if has_sources or not is_one_for_all else None


def share_rows(rows: int, shares: Sequence[float], order: Iterable[int] | None = None) -> list[int]:
    """How many rows each takes, so that whoever takes most for its share takes as few as can be.

    The first in `order`, by default that of the shares, goes before others that would take as long.
    """
    total = sum(shares)
    counts = [int(rows * share / total) for share in shares]
    places = list(order or range(len(shares)))
    for _ in range(rows - sum(counts)):
        counts[min(places, key=lambda place: (counts[place] + 1) / shares[place])] += 1
    return counts


def cut_rows(arrays: Mapping[str, T], axes: Mapping[str, int], rows: int, start: int, stop: int) -> dict[str, T]:
    """The rows from `start` to before `stop` of the arrays that have so many `rows`, and the others whole."""
    cut = {name for name, array in arrays.items() if name in axes and array.shape[axes[name]] == rows}
    return {name: _cut(array, axes[name], start, stop) if name in cut else array for name, array in arrays.items()}


def _cut(array: T, axis: int, start: int, stop: int) -> T:
    if isinstance(array, Zeros):
        return Zeros((*array.shape[:axis], stop - start, *array.shape[axis + 1 :]), array.dtype)
    places = (slice(None),) * axis + (slice(start, stop),)
    return np.ascontiguousarray(on_host(array)[places])
