"""A rank's measured memory, and the prediction."""

from __future__ import annotations

from msgspec import Struct


class RankMemory(Struct, frozen=True):
    """Bytes that a rank uses beyond what it had before loading: with loaded engines, and at the peak.

    The peak includes loading and running. Predicted are the same (weights and the engines' own memory when loaded;
    activations and caches beside them when running), and of these the weights alone.
    """

    device: str
    loaded: int
    peak: int
    predicted_weights: int
    predicted_loaded: int
    predicted_total: int

    @property
    def unaccounted(self) -> int:
        """The measured peak minus the predicted one."""
        return self.peak - self.predicted_total
