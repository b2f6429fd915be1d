"""Sounds from files, and their features."""

from __future__ import annotations

import wave
from pathlib import Path

import numpy as np
import pytest

from splitc.runtime.errors import MisuseError
from splitc.runtime.generate.sound import LogMel, read_log_mel, read_sound, resample

CONFIG = {"feature_size": 80, "sampling_rate": 16000, "hop_length": 160, "n_fft": 400, "n_samples": 480000}
WHISPER = LogMel(80, 16000, 160, 400, 480000)


def tone(rate: int, hertz: float = 440.0, seconds: float = 0.5) -> np.ndarray:
    return np.asarray(0.5 * np.sin(2 * np.pi * hertz * np.arange(int(rate * seconds)) / rate))


def write(path: Path, samples: np.ndarray, width: int, rate: int) -> Path:
    """Samples from -1 to 1, [samples, channels], as whole numbers of `width` bytes."""
    if width == 1:
        data = np.round(samples * 127 + 128).astype(np.uint8).tobytes()
    else:
        whole = np.round(samples * ((1 << 31) - 1)).astype("<i4").reshape(-1, 1).view(np.uint8)
        data = whole[:, 4 - width :].tobytes()
    with wave.open(str(path), "wb") as file:
        file.setnchannels(samples.shape[1])
        file.setsampwidth(width)
        file.setframerate(rate)
        file.writeframes(data)
    return path


@pytest.mark.parametrize("width", [1, 2, 3, 4])
def test_samples_of_all_widths(tmp_path: Path, width: int) -> None:
    channels = np.stack([tone(16000), 0.5 * tone(16000)], axis=1)
    found = read_sound(write(tmp_path / "sound.wav", channels, width, 16000), 16000)
    np.testing.assert_allclose(found, 0.75 * tone(16000), atol=2.0 / (1 << (8 * width - 1)) + 1e-6)
    assert found.dtype == np.float32


@pytest.mark.parametrize("rate", [8000, 22050, 44100, 48000])
def test_other_rates_are_the_same_sound(tmp_path: Path, rate: int) -> None:
    found = read_sound(write(tmp_path / "sound.wav", tone(rate)[:, None], 2, rate), 16000)
    assert len(found) == 8000
    np.testing.assert_allclose(found[400:-400], tone(16000)[400:-400], atol=2e-3)


def test_what_a_rate_can_not_hold_is_left_out() -> None:
    assert np.abs(resample(tone(48000, hertz=10000), 48000, 16000)).max() < 1e-3


def test_damaged_files_are_said(tmp_path: Path) -> None:
    whole = write(tmp_path / "sound.wav", tone(16000)[:, None], 2, 16000).read_bytes()
    for content in (b"", b"RIFF", whole[:20], b"ID3" + whole, whole[:44], whole[:20] + b"\x03\x00" + whole[22:]):
        (tmp_path / "bad.wav").write_bytes(content)
        with pytest.raises(MisuseError, match=r"bad\.wav .*ffmpeg -i bad\.wav -ar 16000"):
            read_sound(tmp_path / "bad.wav", 16000)


def test_sound_that_is_cut_short_is_not_taken_for_whole(tmp_path: Path) -> None:
    """A program that writes to a pipe states the largest possible size."""
    whole = write(tmp_path / "sound.wav", tone(16000)[:, None], 2, 16000).read_bytes()
    (tmp_path / "cut.wav").write_bytes(whole[: len(whole) // 2])
    with pytest.raises(MisuseError, match=r"cut\.wav is cut short: it has [0-9,]+ of 16,000 bytes of sound: write"):
        read_sound(tmp_path / "cut.wav", 16000)
    (tmp_path / "piped.wav").write_bytes(whole[:40] + b"\xff\xff\xff\xff" + whole[44:])
    np.testing.assert_array_equal(read_sound(tmp_path / "piped.wav", 16000), read_sound(tmp_path / "sound.wav", 16000))


def test_a_tone_is_loudest_in_the_filter_of_its_frequency() -> None:
    found = WHISPER.features(tone(16000, hertz=1000.0))
    assert found.shape == (1, 80, 3000)
    centre = WHISPER.filters.argmax(axis=0)[int(np.argmax(found[0, :, 10]))] * 40
    assert abs(centre - 1000.0) <= 40
    assert found[0, :, 1000:].max() == found.min(), "silence follows"


def test_features_are_those_of_transformers() -> None:
    transformers = pytest.importorskip("transformers")
    extractor = transformers.WhisperFeatureExtractor()
    np.testing.assert_allclose(WHISPER.filters, extractor.mel_filters, atol=1e-12)
    sound = tone(16000) + 0.1 * np.random.default_rng(0).standard_normal(8000)
    expected = extractor(sound.astype(np.float32), sampling_rate=16000, return_tensors="np").input_features
    np.testing.assert_allclose(WHISPER.features(sound.astype(np.float32)), expected, atol=2e-5)


def test_configs_of_other_preprocessors_are_refused() -> None:
    assert read_log_mel(CONFIG, Path("p.json"), ["batch", 80, 3000]) == WHISPER
    with pytest.raises(MisuseError, match=r"p\.json is of Speech2TextFeatureExtractor; splitc makes log-mel"):
        read_log_mel({"feature_extractor_type": "Speech2TextFeatureExtractor"}, Path("p.json"), ["batch", 80, 3000])
    with pytest.raises(MisuseError, match="80 bins and 3000 frames, and the encoder takes"):
        read_log_mel(CONFIG, Path("p.json"), ["batch", 128, 3000])
