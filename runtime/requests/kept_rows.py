"""The tokens whose logits a request computes: those that it names, or all."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from splitc.runtime.arrays.array import Array
from splitc.runtime.errors import FeedError
from splitc.runtime.feeds.on_gpu import Feed, on_host
from splitc.runtime.package.states import KeptRows


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
