"""Sounds from WAV files, and the features for speech encoders like Whisper's: the logarithm of a mel spectrogram."""

from __future__ import annotations

import wave
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from splitc.runtime.arrays.array import Array
from splitc.runtime.errors import MisuseError
from splitc.runtime.files.written import check_regular

# What a program that writes to a pipe states as the bytes of sound, or more: it can't know.
UNKNOWN = 0x7FFFF000


def read_sound(path: Path, rate: int) -> Array:
    """The samples of a WAV file as numbers from -1 to 1, [samples], at so many a second. Channels are averaged.

    Raises MisuseError for a file that is none, or has another encoding than whole numbers.
    """
    check_regular(path)
    advice = f"write another one with: ffmpeg -i {path.name} -ar {rate} -ac 1 speech.wav"
    try:
        with wave.open(str(path)) as file:
            width, channels, known = file.getsampwidth(), file.getnchannels(), file.getframerate()
            frames = file.getnframes()
            data = file.readframes(frames)
    except (wave.Error, EOFError) as error:
        why = str(error) or "it ends too early"
        raise MisuseError(f"{path} is not an integer WAV file ({why}): {advice}") from error
    if not known or not channels or width not in (1, 2, 3, 4):
        raise MisuseError(f"{path} has {channels} channels of {width} bytes at {known} Hz: {advice}")
    if len(data) < (stated := frames * width * channels) < UNKNOWN:
        raise MisuseError(f"{path} is cut short: it has {len(data):,} of {stated:,} bytes of sound: {advice}")
    samples = _numbers(data[: len(data) // (width * channels) * width * channels], width)
    if not samples.size:
        raise MisuseError(f"{path} has no samples: {advice}")
    return resample(samples.reshape(-1, channels).mean(1), known, rate)


def _numbers(data: bytes, width: int) -> Array:
    """Samples of `width` bytes as numbers from -1 to 1. Those of one byte are unsigned."""
    raw = np.frombuffer(data, np.uint8).reshape(-1, width)
    if width == 1:
        return (raw[:, 0].astype(np.float64) - 128) / 128
    padded = np.zeros((len(raw), 4), np.uint8)
    padded[:, 4 - width :] = raw
    return padded.view("<i4")[:, 0] / float(1 << 31)


def resample(samples: Array, known: int, rate: int) -> Array:
    """The samples at another rate, without what it can't hold: by their spectrum, cut off or filled with zeros."""
    if known == rate:
        return samples.astype(np.float32)
    count = max(1, round(len(samples) * rate / known))
    return (np.fft.irfft(np.fft.rfft(samples), count) * (count / len(samples))).astype(np.float32)


# The least power that is told from silence, and the range below the loudest that is kept, in powers of ten.
FLOOR, RANGE = 1e-10, 8.0
# The highest frequency that has a filter, in Hz.
HIGHEST = 8000.0
# The mel scale of Slaney's toolbox: linear up to 1000 Hz, 15 mel; then 27 mel for each factor of 6.4.
LINEAR, CORNER, CORNER_MEL, STEP = 200 / 3, 1000.0, 15.0, np.log(6.4) / 27
HIGHEST_MEL = CORNER_MEL + np.log(HIGHEST / CORNER) / STEP
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
        mel = np.linspace(0.0, HIGHEST_MEL, self.bins + 2)
        corners = np.where(mel < CORNER_MEL, mel * LINEAR, CORNER * np.exp(STEP * (mel - CORNER_MEL)))
        frequencies = np.linspace(0.0, self.rate // 2, 1 + self.window // 2)
        away = corners[None] - frequencies[:, None]
        widths = np.diff(corners)
        triangles = np.maximum(0.0, np.minimum(-away[:, :-2] / widths[:-1], away[:, 2:] / widths[1:]))
        areas = 2.0 / (corners[2:] - corners[:-2])
        scaled: Array = triangles * areas
        return scaled


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
