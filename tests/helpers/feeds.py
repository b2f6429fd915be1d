"""Feeds of the decoder that most tests use. Programs that tests start import this without the compiler."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]
Arrays = dict[str, Array]
# Sizes of the decoder.
LAYERS, HEADS, KV_HEADS, HEAD, VOCABULARY = 2, 4, 2, 16, 96


def decoder_feeds(batch: int = 2, new: int = 3, past: int = 5, layers: int = LAYERS) -> Arrays:
    """Feeds for the decoder, from a seed."""
    generator = np.random.default_rng(0)
    cache = (batch, KV_HEADS, past, HEAD)
    feeds: Arrays = {
        "input_ids": generator.integers(0, VOCABULARY, (batch, new)),
        "attention_mask": np.ones((batch, past + new), np.int64),
        "position_ids": np.broadcast_to(np.arange(past, past + new), (batch, new)).copy(),
    }
    for layer in range(layers):
        for part in ("key", "value"):
            feeds[f"past_key_values.{layer}.{part}"] = generator.standard_normal(cache).astype(np.float32)
    return feeds
