"""Damaged tokenizers, files beside them and prompts end in an error message or give tokens."""

from __future__ import annotations

import faulthandler
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from splitc.runtime import Session
from splitc.runtime.errors import SplitcError
from splitc.runtime.generate.text import Text, read_prompt
from tests.conftest import DECODER
from tests.helpers.fuzz import damage_bytes, damage_json, seeds

CONFIGS: dict[str, dict[str, Any]] = {
    "generation_config.json": {"eos_token_id": [94, 95], "bos_token_id": 1},
    "config.json": {"architectures": ["x"], "eos_token_id": 95, "vocab_size": 96},
    "tokenizer_config.json": {
        "eos_token": {"content": "</s>", "lstrip": False},
        "added_tokens_decoder": {"95": {"content": "</s>", "special": True}},
    },
}
ENCODINGS = ["utf-8", "utf-8-sig", "utf-16", "latin-1"]
LETTERS = ["w", "1", "9", ",", " ", "-", "+", "_", ".", "\0", "\n", "\udcff", "é", "\N{SUPERSCRIPT TWO}", "🙂", "</s>"]
# Seconds in which each test has to end.
PATIENCE = 300


@pytest.fixture(autouse=True)
def _ends() -> Iterator[None]:
    faulthandler.dump_traceback_later(PATIENCE, exit=True)
    yield
    faulthandler.cancel_dump_traceback_later()


@pytest.fixture(scope="module")
def session(package: Path) -> Iterator[Session]:
    with Session(package, threads=1) as opened:
        yield opened


def whole_tokenizer() -> Any:
    """The JSON of a tokenizer with every kind of component."""
    words = {f"w{number}": number for number in range(DECODER.vocabulary - 1)}
    made = Tokenizer(models.WordLevel({**words, "</s>": DECODER.vocabulary - 1}, unk_token="w0"))
    made.normalizer = normalizers.Sequence([normalizers.NFC(), normalizers.Replace("é", "e")])
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    made.decoder = decoders.Fuse()
    made.post_processor = processors.TemplateProcessing(single="w1 $A", special_tokens=[("w1", 1)])
    made.add_special_tokens(["</s>"])
    made.enable_padding(length=32)
    made.enable_truncation(64)
    return json.loads(made.to_str())


def write(file: Path, fields: Any, random: np.random.Generator) -> None:
    """The JSON, damaged or not."""
    for _ in range(random.integers(0, 3)):
        if fields:
            damage_json(fields, random)
    encoding = ENCODINGS[max(0, int(random.integers(-20, 4)))]
    content = json.dumps(fields, ensure_ascii=False).encode(encoding, errors="replace")
    file.write_bytes(damage_bytes(content, random) if random.random() < 0.2 else content)


@pytest.mark.fuzz
@pytest.mark.parametrize("seed", seeds(4))
def test_damage_ends_in_a_message(session: Session, seed: int, tmp_path: Path) -> None:
    random = np.random.default_rng(seed)
    for _ in range(30):
        write(tmp_path / "tokenizer.json", whole_tokenizer(), random)
        for name, fields in CONFIGS.items():
            (tmp_path / name).unlink(missing_ok=True)
            if random.random() < 0.5:
                write(tmp_path / name, json.loads(json.dumps(fields)), random)
        try:
            text = Text.load(tmp_path)
            prompt = read_prompt(text, "w5 w17" + write_prompt(random) * (random.random() < 0.3), None)
            stops = text.find_endings()
            tokens = list(session.generate(prompt, max_new_tokens=3, stop_tokens=stops))
            for token in tokens:
                text.step(token)
            text.decode(tokens)
        except SplitcError as error:
            assert str(error)


def write_prompt(random: np.random.Generator) -> str:
    return "".join(LETTERS[number] for number in random.integers(len(LETTERS), size=random.integers(12)))


@pytest.mark.fuzz
@pytest.mark.parametrize("seed", seeds(4))
def test_prompts_of_any_characters_end_in_a_message(session: Session, seed: int) -> None:
    random = np.random.default_rng(seed)
    for _ in range(100):
        try:
            prompt = read_prompt(None, None, write_prompt(random))
            assert list(session.generate(prompt, max_new_tokens=1))
            assert all(0 <= token < DECODER.vocabulary for token in prompt)
        except SplitcError as error:
            assert str(error)
