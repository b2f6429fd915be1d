"""Requests that run together, as one batch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from splitc.runtime.arrays.array import Array
from splitc.runtime.feeds.on_gpu import is_on_gpu

Feeds = Mapping[str, Array]


def group_alike(requests: Sequence[Feeds]) -> list[list[int]]:
    """The numbers of the requests, grouped by all but their number of rows."""
    groups: dict[Any, list[int]] = {}
    for number, feeds in enumerate(requests):
        rows = {array.shape[:1] for array in feeds.values()}
        alike = tuple(sorted((name, str(a.dtype), a.shape[1:], is_on_gpu(a)) for name, a in feeds.items()))
        # A request whose arrays differ in their rows runs alone, so that it fails alone.
        groups.setdefault((alike, None if len(rows) == 1 and () not in rows else number), []).append(number)
    return list(groups.values())


def join_rows(requests: Sequence[Feeds]) -> tuple[dict[str, Array], list[int]]:
    """One batch with the rows of all requests, and the first row of each request except the first.

    CuPy arrays are joined on their GPU.
    """
    joined = {name: np.concatenate([feeds[name] for feeds in requests]) for name in requests[0]}
    counts = [next(iter(feeds.values())).shape[0] for feeds in requests]
    return joined, [int(row) for row in np.cumsum(counts)[:-1]]


def part_rows(outputs: Feeds, starts: Sequence[int]) -> list[dict[str, Array]]:
    """Split the outputs of a batch into those of each request."""
    parts = {name: np.split(array, starts) for name, array in outputs.items()}
    return [{name: pieces[number] for name, pieces in parts.items()} for number in range(len(starts) + 1)]
