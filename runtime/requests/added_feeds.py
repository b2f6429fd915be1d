"""What ranks take besides a request's own feeds: the tokens whose logits are computed, and how full caches are.

The number of filled rows in caches that are written in place is the size of an input.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from splitc.runtime.arrays.array import Array
from splitc.runtime.errors import FeedError
from splitc.runtime.feeds.on_gpu import Feed, on_host
from splitc.runtime.package.states import KeptRows, Length


def with_lengths(lengths: Sequence[Length], feeds: Mapping[str, Feed]) -> dict[str, Feed]:
    """A request's feeds, with the ranks' inputs for the lengths of the pasts in it.

    Raises FeedError if pasts differ in length, and for a request that the engines can't run.
    """
    filled = {length.input: filled_rows(length, feeds) for length in lengths}
    batch = max((feeds[length.states[0]].shape[0] for length in lengths), default=1)
    check_lengths(lengths, batch, filled, feeds)
    return {**feeds, **length_feeds(lengths, batch, filled, feeds)}


def check_lengths(lengths: Sequence[Length], batch: int, filled: Mapping[str, int], feeds: Mapping[str, Feed]) -> None:
    """Raise FeedError for a request that the engines can't run, since they write caches in place."""
    for length in lengths:
        before, more = filled[length.input], added(length, feeds)
        if not batch or not more:  # where there is no row, ONNX Runtime's operator ends the process: it divides by zero
            raise FeedError(
                f"the request has {more} tokens in {batch} rows: this package writes caches in place, and needs at "
                "least one token and one row. Compile with --no-fuse for empty requests"
            )
        if _is_for_one_row(length, batch, more, before):
            raise FeedError(
                f"the request has {more} tokens after {before} cached ones in {batch} rows: this package takes several "
                "tokens after cached ones in a batch of one row only. Give one at a time, or compile with --no-fuse"
            )


def length_feeds(
    lengths: Sequence[Length], batch: int, filled: Mapping[str, int], feeds: Mapping[str, Feed], room: int = 0
) -> dict[str, Array]:
    """The ranks' inputs for lengths: arrays with one axis as long as the filled rows.

    A second axis of size 1 makes the engines run their branch for several rows. An input for the `room` has no bytes.
    """
    made = {}
    for length in lengths:
        before, more = filled[length.input], added(length, feeds)
        made[length.input] = np.zeros((before, int(_is_apart(length, batch, filled, feeds))), np.bool_)
        if length.room is not None:
            # For a single token all of it, so that the next one has the same sizes. More are read faster without.
            made[length.room] = np.zeros((max(room, before + more) if more == 1 else before + more, 0), np.bool_)
    return made


def needs_one_row(lengths: Sequence[Length], feeds: Mapping[str, Feed]) -> bool:
    """Whether the engines run a request with these pasts only for one row of the batch at a time."""
    return any(
        _is_for_one_row(length, feeds[length.states[0]].shape[0], added(length, feeds), filled_rows(length, feeds))
        for length in lengths
    )


def _is_for_one_row(length: Length, batch: int, more: int, before: int) -> bool:
    return length.one_row and batch > 1 and more > 1 and before > 0


def _is_apart(length: Length, batch: int, filled: Mapping[str, int], feeds: Mapping[str, Feed]) -> bool:
    """Whether the engines' operator can't read a request's tokens after the earlier ones."""
    return length.by_branch and batch > 1 and added(length, feeds) > 1 and filled[length.input] > 0


def lengthened(array: Array, axis: int, rows: int) -> Array:
    """An array with at least this number of rows along an axis: padded with zeros, in a fifth of np.pad's time."""
    if array.shape[axis] >= rows:
        return array
    made = np.zeros((*array.shape[:axis], rows, *array.shape[axis + 1 :]), array.dtype)
    np.moveaxis(made, axis, 0)[: array.shape[axis]] = np.moveaxis(array, axis, 0)
    return made


def filled_rows(length: Length, pasts: Mapping[str, Feed]) -> int:
    """The rows of pasts. Raises FeedError if they differ."""
    first, *others = length.states
    filled = pasts[first].shape[length.axis]
    for name in others:
        if (rows := pasts[name].shape[length.axis]) != filled:
            raise FeedError(
                f"'{first}' has {filled} rows and '{name}' {rows}: all caches of this package have one length "
                "(with --no-fuse they may differ)"
            )
    return filled


def added(length: Length, feeds: Mapping[str, Feed]) -> int:
    """How many rows a request adds."""
    if length.reads is None:
        return length.adds
    name, axis = length.reads
    return feeds[name].shape[axis]


def with_kept_rows(kept: KeptRows | None, feeds: Mapping[str, Feed]) -> Mapping[str, Feed]:
    """A request's feeds, with the indices of its tokens if it names none; unchanged if the package takes none.

    Raises FeedError for an index beyond the request's tokens.
    """
    if kept is None:
        return feeds
    name, axis = kept.reads
    tokens = feeds[name].shape[axis]
    if kept.input not in feeds:
        return {**feeds, kept.input: np.arange(tokens)}
    rows = on_host(feeds[kept.input])
    if wrong := [int(row) for row in rows if not -tokens <= row < tokens]:
        raise FeedError(f"'{kept.input}' has the token {wrong[0]}, and the request has {tokens}: they count from 0")
    return feeds


def chosen_rows(kept: KeptRows | None, outputs: Mapping[str, Array], feeds: Mapping[str, Array]) -> dict[str, Array]:
    """All outputs of the unsplit model, of which a request with these feeds wants some tokens' rows."""
    if kept is None or kept.input not in feeds:
        return dict(outputs)
    axes = kept.outputs
    return {name: np.take(a, feeds[kept.input], axes[name]) if name in axes else a for name, a in outputs.items()}
