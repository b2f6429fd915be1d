"""The features for speech encoders like Whisper's: the logarithm of a mel spectrogram."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from splitc.runtime.arrays.array import Array
from splitc.runtime.errors import MisuseError

# The least power that is told from silence, and the range below the loudest that is kept, in powers of ten.
FLOOR, RANGE = 1e-10, 8.0
# The highest frequency that has a filter, in Hz.
HIGHEST = 8000.0
# The mel scale of Slaney's toolbox: linear up to 1000 Hz, 15 mel; then 27 mel for each factor of 6.4.
LINEAR, CORNER, CORNER_MEL, STEP = 200 / 3, 1000.0, 15.0, np.log(6.4) / 27
NUMBERS = ("feature_size", "sampling_rate", "hop_length", "n_fft", "n_samples")


@dataclass(frozen=True)
class LogMel:
    """A preprocessor. `bins` filters, a frame every `hop` samples of `window` each, `samples` at a time."""

    bins: int
    rate: int
    hop: int
    window: int
    samples: int

    def features(self, sound: Array) -> Array:
        """The features of a sound of at most `samples`, followed by silence: float32, [1, bins, frames]."""
        padded = np.zeros(self.samples)
        padded[: len(sound)] = sound
        padded = np.pad(padded, self.window // 2, mode="reflect")
        frames = np.lib.stride_tricks.sliding_window_view(padded, self.window)[:: self.hop][:-1]
        hann = 0.5 - 0.5 * np.cos(2 * np.pi * np.arange(self.window) / self.window)
        power = np.abs(np.fft.rfft(frames * hann)) ** 2
        logs = np.log10(np.maximum(self.filters.T @ power.T, FLOOR))
        kept: Array = np.maximum(logs, logs.max() - RANGE)
        return ((kept + 4.0) / 4.0).astype(np.float32)[None]

    def windows(self, sound: Array) -> Iterator[Array]:
        """The features of a sound of any length, a window after the other."""
        for start in range(0, len(sound), self.samples):
            yield self.features(sound[start : start + self.samples])

    @cached_property
    def filters(self) -> Array:
        """Triangles over the frequencies, of equal area: [frequencies, bins]."""
        corners = _hertz(np.linspace(0.0, _mel(HIGHEST), self.bins + 2))
        frequencies = np.linspace(0.0, self.rate // 2, 1 + self.window // 2)
        away = corners[None] - frequencies[:, None]
        widths = np.diff(corners)
        triangles = np.maximum(0.0, np.minimum(-away[:, :-2] / widths[:-1], away[:, 2:] / widths[1:]))
        areas = 2.0 / (corners[2:] - corners[:-2])
        scaled: Array = triangles * areas
        return scaled


def _mel(hertz: float) -> float:
    return hertz / LINEAR if hertz < CORNER else float(CORNER_MEL + np.log(hertz / CORNER) / STEP)


def _hertz(mel: Array) -> Array:
    return np.where(mel < CORNER_MEL, mel * LINEAR, CORNER * np.exp(STEP * (mel - CORNER_MEL)))


def read_log_mel(config: Mapping[str, Any], file: Path, shape: list[int | str | None]) -> LogMel:
    """The preprocessor of a config, for an encoder that takes features of this shape.

    Raises MisuseError for a config of another preprocessor, and for one that does not fit the encoder.
    """
    numbers = [config.get(name) for name in NUMBERS]
    if any(not isinstance(number, int) or number < 1 for number in numbers) or config.get("dither"):
        kind = config.get("feature_extractor_type", "another preprocessor")
        raise MisuseError(
            f"{file} is of {kind}; splitc makes log-mel features as Whisper has them, of {', '.join(NUMBERS)}. Make "
            "the features in Python: see docs/guide/speech.md"
        )
    made = LogMel(*numbers)  # type: ignore[arg-type]  # they are numbers: see above
    frames = made.samples // made.hop
    if any(isinstance(a, int) and a != b for a, b in zip(shape[1:], (made.bins, frames), strict=True)):
        raise MisuseError(f"{file} has {made.bins} bins and {frames} frames, and the encoder takes {shape[1:]}")
    return made
