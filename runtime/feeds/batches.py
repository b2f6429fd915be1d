"""Micro-batches: independent rows of a batch, which follow each other through the stages."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from splitc.runtime.errors import FeedError, MisuseError
from splitc.runtime.units import whole_number

Arrays = dict[str, npt.NDArray[Any]]


def cut_batches(feeds: Mapping[str, npt.NDArray[Any]], axes: Mapping[str, int] | None, rows: int) -> list[Arrays]:
    """Micro-batches of `rows` rows, cut along the batch axis of each input that has one (`axes`).

    Raises MisuseError if the model has no known batch axis, FeedError if inputs disagree on its length.
    """
    rows = whole_number("micro_batch", rows, 1, of=" of rows")
    if axes is None:
        raise MisuseError(
            "micro_batch: rows of a batch may depend on each other in this model: the compiler found no batch axis "
            "that goes from the inputs to all outputs"
        )
    lengths = {name: array.shape[axes[name]] for name, array in feeds.items() if name in axes}
    if len(set(lengths.values())) > 1:
        raise FeedError(f"micro_batch: the inputs have batches of different lengths: {lengths}")
    whole = next(iter(lengths.values()))
    return [
        {
            name: array.take(range(start, min(start + rows, whole)), axes[name]) if name in axes else array
            for name, array in feeds.items()
        }
        for start in range(0, max(1, whole), rows)  # an empty batch is one micro-batch
    ]


def join_batches(pieces: Sequence[Mapping[str, npt.NDArray[Any]]], axes: Mapping[str, int] | None) -> Arrays:
    """The outputs of all micro-batches, joined along the batch axis of each output. One without is the same in all."""
    assert axes is not None
    return {
        name: np.concatenate([piece[name] for piece in pieces], axes[name]) if name in axes else first
        for name, first in pieces[0].items()
    }
