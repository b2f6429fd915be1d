"""A rank's measured memory, and the prediction."""

from __future__ import annotations

from msgspec import Struct


class RankMemory(Struct, frozen=True):
    """Bytes that a rank uses beyond what it had before loading: with loaded engines, and at the peak.

    The peak includes loading and running.
    """

    device: str
    loaded: int
    peak: int
    predicted_weights: int
    predicted_total: int
