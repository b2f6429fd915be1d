"""Text from a package's modules by a call from Python: defaults of configs, and the reason for the end."""

from __future__ import annotations

import json
import shutil
from collections.abc import Generator
from pathlib import Path

import pytest

from splitc.compiler import compile_pipeline, plan_pipeline
from splitc.runtime import MisuseError, Pipeline
from splitc.runtime.generate.tokens import LIMIT, STOP, Timings
from tests.helpers import encoder_decoders as made

TEXT = [7, 21, 5, 33]


@pytest.fixture(scope="module")
def packages(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A package of speech and one of text, on one device each."""
    folder = tmp_path_factory.mktemp("recipe")
    for name, write in (("speech", made.speech_folder), ("text", made.text_folder)):
        compile_pipeline(plan_pipeline(write(folder / f"{name}-models"), ["cpu0"]), folder / name, verify=False)
    return folder


def ended(stream: Generator[int, None, str]) -> tuple[list[int], str]:
    """The tokens of a stream, and why it ended."""
    tokens = []
    while True:
        try:
            tokens.append(next(stream))
        except StopIteration as end:
            return tokens, end.value


def test_first_and_last_tokens_come_from_the_config(packages: Path) -> None:
    """The decoder's first token and the end token are the config's. The caller may give another end token."""
    feeds = {"input_ids": [TEXT], "attention_mask": [[1] * len(TEXT)]}
    expected = made.plain_tokens(packages / "text-models", feeds, [0], 12)  # type: ignore[arg-type]
    with Pipeline(packages / "text", threads=1) as pipeline:
        timings = Timings()
        assert ended(pipeline.generate(TEXT, max_new_tokens=12, timings=timings)) == (expected, LIMIT)
        assert (timings.prompt_tokens, timings.tokens) == (1, 11)
        assert timings.encoder_seconds > 0
        stop = expected[5]
        until = expected[: expected.index(stop)]
        assert ended(pipeline.generate(TEXT, max_new_tokens=12, stop_tokens=[stop])) == (until, STOP)
        with pytest.raises(MisuseError, match="can't read a sound"):
            next(pipeline.generate(sound="speech.wav"))
        with pytest.raises(MisuseError, match="its encoder takes a text"):
            next(pipeline.generate())


def test_tokens_that_end_a_text_if_no_config_names_one(packages: Path, tmp_path: Path) -> None:
    package = tmp_path / "package"
    shutil.copytree(packages / "text", package)
    config = package / "config.json"
    content = json.loads(config.read_text())
    with Pipeline(package, threads=1) as pipeline:
        tokens, _ = ended(pipeline.generate(TEXT, max_new_tokens=12))
        others = {"max_new_tokens": 12, "other_stop_tokens": [tokens[5]]}
        assert ended(pipeline.generate(TEXT, **others)) == (tokens, LIMIT)
        config.write_text(json.dumps({key: value for key, value in content.items() if key != "eos_token_id"}))
        assert ended(pipeline.generate(TEXT, **others)) == (tokens[: tokens.index(tokens[5])], STOP)


def test_long_sound_is_generated_in_windows(packages: Path, tmp_path: Path) -> None:
    """A sound of two windows gives two texts, and a warning."""
    sound = made.write_sound(tmp_path / "sound.wav", 1, seconds=0.3)
    with Pipeline(packages / "speech", threads=1) as pipeline:
        with pytest.warns(UserWarning, match="at a time"):
            tokens, _ = ended(pipeline.generate(sound=sound, language="en"))
        said: list[str] = []
        german = list(pipeline.generate(sound=sound, language="de", task="translate", warn=said.append))
    assert tokens != german
    assert len(said) == 1
