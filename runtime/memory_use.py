"""The memory that a rank was measured to use, beside what was predicted."""

from __future__ import annotations

from msgspec import Struct


class RankMemory(Struct, frozen=True):
    """Resident bytes of a rank's process above what it had before: with its engines loaded, and at its peak.

    The peak counts loading, and one run on the given feeds with their shapes.
    """

    device: str
    loaded: int
    peak: int
    predicted_weights: int
    predicted_total: int
