"""Log probabilities of the chosen tokens."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt


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
