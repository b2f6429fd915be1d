"""Generation by onnxruntime-genai."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np


def open_model(folder: Path) -> Any:
    """A model that genai has loaded."""
    import onnxruntime_genai as genai

    return genai.Model(str(folder))


def generate(model: Any, prompt: Sequence[int], count: int) -> tuple[list[int], list[float]]:
    """Tokens that genai generates, and the seconds of each. The first includes the prompt."""
    import onnxruntime_genai as genai

    params = genai.GeneratorParams(model)
    params.set_search_options(max_length=len(prompt) + count, do_sample=False)
    start = time.perf_counter()
    generator = genai.Generator(model, params)
    generator.append_tokens(np.array([prompt], np.int32))
    tokens, seconds = [], []
    while not generator.is_done():
        generator.generate_next_token()
        tokens.append(int(generator.get_next_tokens()[0]))
        seconds.append(time.perf_counter() - start)
        start = time.perf_counter()
    return tokens, seconds
