"""Greedy generation with an unsplit decoder."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from pathlib import Path

import numpy as np

from tests.conftest import DECODER, Arrays, whole_session


def plain_loop(model: Path, prompt: Sequence[int], count: int) -> list[int]:
    """Greedy tokens of the unsplit model, whose cache is fed back by hand."""
    return list(_plain_loop(model, tuple(prompt), count))


@cache
def _plain_loop(model: Path, prompt: tuple[int, ...], count: int) -> list[int]:
    session = whole_session(model)
    outputs = [value.name for value in session.get_outputs()]
    cache: Arrays = {}
    for value in session.get_inputs():
        if value.name.startswith("past"):
            cache[value.name] = np.zeros((1, DECODER.kv_heads, 0, DECODER.head), np.float32)
    tokens, new = list(prompt), list(prompt)
    for _ in range(count):
        total = len(tokens)
        feeds: Arrays = {
            "input_ids": np.array([new], np.int64),
            "attention_mask": np.ones((1, total), np.int64),
            "position_ids": np.arange(total - len(new), total)[None],
        }
        results = dict(zip(outputs, session.run(None, {**feeds, **cache})))
        cache = {name: results[name.replace("past_key_values", "present")] for name in cache}
        new = [int(results["logits"][0, -1].argmax())]
        tokens += new
    return tokens[len(prompt) :]
