"""How likely a model finds the tokens that were chosen."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt


class Chances:
    """A rule of `generate` that changes nothing, and remembers the last logits."""

    def __init__(self) -> None:
        self._logits: npt.NDArray[Any] = np.zeros(0)

    def __call__(self, logits: npt.NDArray[Any], tokens: Sequence[int]) -> npt.NDArray[Any]:
        """The logits as they are."""
        self._logits = logits
        return logits

    def of(self, token: int, count: int) -> list[tuple[int, float]]:
        """The token that was chosen by the last logits, and the `count` likeliest ones, one with its log probability.

        These are the model's own, whatever the temperature.
        """
        logits = self._logits.astype(np.float64)
        logs = logits - logits.max()
        logs -= np.log(np.exp(logs).sum())
        likeliest = np.argsort(-logs, kind="stable")[:count].tolist()
        return [(one, float(logs[one])) for one in (token, *likeliest)]
