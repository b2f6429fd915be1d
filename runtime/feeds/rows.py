"""Rows of a batch: their division by shares, slices of arrays, and micro-batches."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import TypeVar

import numpy as np

from splitc.runtime.arrays.array import Array, Zeros
from splitc.runtime.errors import FeedError, MisuseError
from splitc.runtime.feeds.on_gpu import Feed, on_host
from splitc.runtime.units import whole_number

T = TypeVar("T", Array, Feed, Array | Zeros)


def count_rows(
    arrays: Mapping[str, Feed | Zeros], axes: Mapping[str, int], sources: Collection[str] = ()
) -> int | None:
    """The size of the arrays' row axes (`axes`); None if they differ, or no array has rows.

    A single row may broadcast to all, except in the `sources`.
    """
    lengths = {name: array.shape[axes[name]] for name, array in arrays.items() if name in axes}
    rows = max(lengths.values(), default=None)
    if rows is None or not set(lengths.values()) <= {1, rows}:
        return None
    is_one_for_all = len(set(lengths.values())) > 1
    has_sources = bool(sources) and all(lengths.get(name, rows) == rows for name in sources)
    return rows if has_sources or not is_one_for_all else None


def share_rows(rows: int, shares: Sequence[float], order: Iterable[int] | None = None) -> list[int]:
    """Divide rows by shares, so that the largest quotient of rows and share is as small as possible.

    On a tie the first in `order` goes first, by default in the order of the shares.
    """
    total = sum(shares)
    counts = [int(rows * share / total) for share in shares]
    places = list(order or range(len(shares)))
    for _ in range(rows - sum(counts)):
        counts[min(places, key=lambda place: (counts[place] + 1) / shares[place])] += 1
    return counts


def cut_rows(arrays: Mapping[str, T], axes: Mapping[str, int], rows: int, start: int, stop: int) -> dict[str, T]:
    """Slice the rows from `start` to before `stop` of the arrays with `rows` rows. Other arrays stay whole."""
    cut = {name for name, array in arrays.items() if name in axes and array.shape[axes[name]] == rows}
    return {name: _cut(array, axes[name], start, stop) if name in cut else array for name, array in arrays.items()}


def _cut(array: T, axis: int, start: int, stop: int) -> T:
    if isinstance(array, Zeros):
        return Zeros((*array.shape[:axis], stop - start, *array.shape[axis + 1 :]), array.dtype)
    places = (slice(None),) * axis + (slice(start, stop),)
    return np.ascontiguousarray(on_host(array)[places])


def cut_batches(
    feeds: Mapping[str, Array], axes: Mapping[str, int] | None, rows: int, sources: Collection[str] = ()
) -> list[dict[str, Array]]:
    """Micro-batches of `rows` rows. For the `sources` see `count_rows`.

    Raises MisuseError if the model has no known batch axis, FeedError if inputs disagree on its length.
    """
    rows = whole_number("micro_batch", rows, 1, of=" of rows")
    if axes is None:
        raise MisuseError(
            "micro_batch: rows of a batch may depend on each other in this model: the compiler found no batch axis "
            "that goes from the inputs to all outputs"
        )
    if (whole := count_rows(feeds, axes, sources)) is None:
        lengths = {name: array.shape[axes[name]] for name, array in feeds.items() if name in axes}
        raise FeedError(f"micro_batch: the inputs have batches of different lengths: {lengths}")
    starts = range(0, max(1, whole), rows)  # an empty batch is one micro-batch
    return [cut_rows(feeds, axes, whole, start, min(start + rows, whole)) for start in starts]


def join_batches(pieces: Sequence[Mapping[str, Array]], axes: Mapping[str, int] | None) -> dict[str, Array]:
    """The outputs of all micro-batches, concatenated along their batch axes. Outputs without one are equal in all."""
    assert axes is not None
    return {
        name: np.concatenate([piece[name] for piece in pieces], axes[name]) if name in axes else first
        for name, first in pieces[0].items()
    }
