"""Sounds from WAV files."""

from __future__ import annotations

import wave
from pathlib import Path

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
