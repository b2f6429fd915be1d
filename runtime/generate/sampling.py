"""Choose the next token from a model's logits: the likeliest one, or a random one. Its log probability."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from numbers import Real
from typing import Any

import numpy as np
import numpy.typing as npt

from splitc.runtime.errors import EngineError, MisuseError
from splitc.runtime.units import whole_number

# Lower temperatures choose as 0 does: logits divided by them would be infinite.
COLDEST = 1e-6


@dataclass(frozen=True)
class Sampling:
    """How to choose a token. `temperature` 0 takes the likeliest one.

    Otherwise a token is drawn, with random numbers from `seed`, from the `top_k` likeliest ones (0: all), cut to the
    fewest whose probabilities sum to `top_p`. Raises MisuseError for numbers that mean nothing.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int = 0

    def __post_init__(self) -> None:
        if not _is_real(self.temperature) or not 0 <= self.temperature < math.inf:
            raise MisuseError(f"temperature {self.temperature!r}: it is 0 (the likeliest token) or more")
        if not _is_real(self.top_p) or not 0 < self.top_p <= 1:
            raise MisuseError(f"top-p {self.top_p!r}: it is above 0 and at most 1")
        whole_number("top-k", self.top_k, 0, of=" of tokens (0: all)")
        whole_number("seed", self.seed, 0)


def _is_real(value: object) -> bool:
    return isinstance(value, Real) and not isinstance(value, bool)


def random_numbers(sampling: Sampling) -> np.random.Generator:
    """The random numbers for a text's tokens. Raises MisuseError for what is no Sampling."""
    if not isinstance(sampling, Sampling):
        raise MisuseError(f"sampling is a Sampling, such as Sampling(temperature=0.7), not {sampling!r}")
    return np.random.default_rng(sampling.seed)


def choose_token(logits: npt.NDArray[Any], sampling: Sampling, generator: np.random.Generator) -> int:
    """Choose a token by its logits, a vector with one number for each token of the vocabulary.

    Raises EngineError if one of them is NaN, or if all are excluded.
    """
    likeliest = int(np.argmax(logits))  # or the first one that is no number
    largest = float(logits[likeliest])
    if math.isnan(largest):
        raise EngineError(
            f"the model's logits are not a number (NaN) for the token {likeliest}: numbers inside it may be too large "
            "for its type, or its weights damaged. 'splitc check' says whether the unsplit model gives the same"
        )
    if largest == -math.inf:
        raise EngineError("no token may come next: the model and its generation config rule all of them out")
    if sampling.temperature < COLDEST or largest == math.inf:
        return likeliest
    scaled = logits.astype(np.float64) / sampling.temperature
    order = np.argsort(-scaled, kind="stable")
    if sampling.top_k:
        order = order[: sampling.top_k]
    chances = np.exp(scaled[order] - scaled[order[0]])
    chances /= chances.sum()
    # The first one is always kept, each further one if those before it have not reached top_p.
    kept = np.concatenate([[True], np.cumsum(chances)[:-1] < sampling.top_p])
    order, chances = order[kept], chances[kept]
    return int(generator.choice(order, p=chances / chances.sum()))


class Chances:
    """A rule of `generate` that records the last logits and changes nothing."""

    def __init__(self) -> None:
        self._logits: npt.NDArray[Any] = np.zeros(0)

    def __call__(self, logits: npt.NDArray[Any], tokens: Sequence[int]) -> npt.NDArray[Any]:
        """The logits, unchanged."""
        self._logits = logits
        return logits

    def of(self, token: int, count: int) -> list[tuple[int, float]]:
        """The chosen token and the `count` likeliest ones, with their log probabilities by the last logits.

        These are the model's own, whatever the temperature.
        """
        logits = self._logits.astype(np.float64)
        logs = logits - logits.max()
        logs -= np.log(np.exp(logs).sum())
        likeliest = np.argsort(-logs, kind="stable")[:count].tolist()
        return [(one, float(logs[one])) for one in (token, *likeliest)]
