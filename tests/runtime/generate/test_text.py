"""Prompts as text: tokenizers, the files beside them, and the tokens that end a text."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers
from typer.testing import CliRunner, Result

from splitc.runtime.cli.app import app
from splitc.runtime.cli.terminal import muted_stderr
from splitc.runtime.errors import MisuseError
from splitc.runtime.generate.text import Text, read_prompt
from tests.conftest import DECODER
from tests.helpers.greedy import plain_loop

PROMPT = "w5 w17 w33"
IDS = [5, 17, 33]


@pytest.fixture
def tokenizer(tmp_path: Path) -> Path:
    """A folder with a tokenizer of the decoder's vocabulary, a word for each token."""
    words = {f"w{number}": number for number in range(DECODER.vocabulary)}
    made = Tokenizer(models.WordLevel(words, unk_token="w0"))
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    made.save(str(tmp_path / "tokenizer.json"))
    return tmp_path


def generate(package: Path, tokenizer: Path, *options: str) -> Result:
    arguments = ["generate", str(package), "--tokenizer", str(tokenizer), "-p", PROMPT, "-n", "4", "--json"]
    return CliRunner().invoke(app, [*arguments, *options])


# Forms in which a file may name the third token that the decoder makes, as a number and as a word.
FORMS: dict[str, Callable[[int, str], Any]] = {
    "a number": lambda number, word: {"eos_token_id": number},
    "numbers": lambda number, word: {"eos_token_id": [94, number]},
    "a word": lambda number, word: {"eos_token": word},
    "an object": lambda number, word: {"eos_token": {"__type": "AddedToken", "content": word, "lstrip": False}},
    "words": lambda number, word: {"eos_token": [word, "w94"]},
    "after none": lambda number, word: {"eos_token_id": None, "eos_token": word},
    "after one that there is not": lambda number, word: {"eos_token_id": -1, "eos_token": word},
    "added": lambda number, word: {
        "eos_token": {"content": "</s>"},
        "added_tokens_decoder": {str(number): {"content": "</s>"}, "x": 5},
    },
}


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("file", ["generation_config.json", "tokenizer_config.json"])
def test_generation_ends_at_the_token_that_a_file_names(
    package: Path, decoder: Path, tokenizer: Path, form: str, file: str
) -> None:
    expected = plain_loop(decoder, IDS, 4)
    end = expected.index(expected[2])
    (tokenizer / file).write_text(json.dumps(FORMS[form](expected[2], f"w{expected[2]}")), encoding="utf-8")
    found = generate(package, tokenizer)
    assert json.loads(found.stdout)["tokens"] == expected[:end]


def test_json_may_have_any_of_its_encodings(tokenizer: Path) -> None:
    for encoding in ("utf-8", "utf-8-sig", "utf-16", "utf-32"):
        (tokenizer / "config.json").write_text('{"eos_token_id": [7]}', encoding=encoding)
        assert Text.load(tokenizer).find_endings() == [7]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"{nope", "is no JSON: Expecting property name"),
        (b"", "is no JSON"),
        (b'{"a": "\xe9"}', "is no JSON: 'utf-8' codec"),
        (b"[" * 100_000, "is no JSON: maximum recursion depth"),
        (b'{"a": ' + b"9" * 6000 + b"}", "is no JSON: Exceeds the limit"),
        (b"[1, 2]", r"should be a JSON object .* it is \[1, 2\]. Name the token .* by its id, as --stop 2"),
        (b"null", "should be a JSON object"),
        (b'{"eos_token_id": true}', "'eos_token_id' should be the token that ends a text: it is true"),
        (b'{"eos_token_id": 2.5}', "it is 2.5"),
        (b'{"eos_token": [[1]]}', r"it is \[\[1\]\]"),
        (b'{"eos_token": {"content": [1]}}', "it is {"),
        (b'{"eos_token": "\\udcff"}', "can't look up"),
    ],
)
def test_damaged_files_beside_a_tokenizer_are_said(
    package: Path, tokenizer: Path, content: bytes, message: str
) -> None:
    """Otherwise the text would not end where it should. With the caller's stop tokens none of them is needed."""
    (tokenizer / "config.json").write_bytes(content)
    found = generate(package, tokenizer)
    assert isinstance(found.exception, MisuseError)
    with pytest.raises(MisuseError, match=message):
        raise found.exception
    assert generate(package, tokenizer, "--stop", "40").exit_code == 0


def test_what_is_no_file_is_said(tokenizer: Path) -> None:
    config = tokenizer / "config.json"
    config.mkdir()
    with pytest.raises(MisuseError, match=r"can't read .*config.json: it is a folder"):
        Text.load(tokenizer).find_endings()
    config.rmdir()
    config.symlink_to("nowhere")
    with pytest.raises(MisuseError, match="No such file"):
        Text.load(tokenizer).find_endings()
    config.unlink()
    os.mkfifo(config)
    with pytest.raises(MisuseError, match="no regular file"):
        Text.load(tokenizer).find_endings()
    (tokenizer / "tokenizer.json").unlink()
    os.mkfifo(tokenizer / "tokenizer.json")
    with pytest.raises(MisuseError, match="no regular file"):
        Text.load(tokenizer)


def damaged(tokenizer: Path, **fields: Any) -> Path:
    file = tokenizer / "tokenizer.json"
    file.write_text(json.dumps({**json.loads(file.read_bytes()), **fields}), encoding="utf-8")
    return tokenizer


def test_what_the_tokenizers_library_makes_of_a_damaged_file_is_said(
    tokenizer: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """The library panics, which is no Exception, and prints a trace, which the command line drops."""
    panics = damaged(tokenizer, normalizer={"type": "Precompiled", "precompiled_charsmap": "AAAA"})
    with pytest.raises(MisuseError, match=r"is no tokenizer\.json: Precompiled"), muted_stderr():
        Text.load(panics)
    one = {"SpecialToken": {"id": "[X]", "type_id": 0}}
    twice = {"type": "TemplateProcessing", "single": [one, {"Sequence": {"id": "B", "type_id": 0}}], "pair": []}
    specials = {"special_tokens": {"[X]": {"id": "[X]", "ids": [1], "tokens": ["[X]"]}}}
    text = Text.load(damaged(tokenizer, normalizer=None, post_processor={**twice, **specials}))
    with pytest.raises(MisuseError, match="can't read the prompt: index out of bounds"), muted_stderr():
        text.encode("w1")
    assert capfd.readouterr().err == ""
    nothing = {"type": "WordLevel", "vocab": {}, "unk_token": "w0"}
    text = Text.load(damaged(tokenizer, post_processor=None, model=nothing))
    with pytest.raises(MisuseError, match=r"can't read the prompt: .*Missing"):
        text.encode("w1")


def test_prompts_of_bytes_that_are_no_text_are_said(tokenizer: Path) -> None:
    with pytest.raises(MisuseError, match=r"the prompt is no UTF-8: see '\\udcff', its character 2"):
        Text.load(tokenizer).encode("a\udcff")


@pytest.mark.parametrize("wrong", ["\N{SUPERSCRIPT TWO}", "9" * 5000, "1_0", "\N{ARABIC-INDIC DIGIT THREE}", "", "1.0"])
def test_odd_numbers_in_prompts_are_said(wrong: str) -> None:
    with pytest.raises(MisuseError, match=r"can't read --prompt-ids .* is no number of a token") as found:
        read_prompt(None, None, f"1,{wrong}")
    assert len(str(found.value)) < 300


def test_caller_has_its_stderr(tokenizer: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It belongs to the whole process: if two threads muted it, the second would keep it muted forever."""
    with monkeypatch.context() as patch:  # pytest itself replaces it at the end of a test
        patch.setattr(os, "dup2", lambda *_: pytest.fail("stderr was replaced"))
        text = Text.load(tokenizer)
        assert text.encode(PROMPT) == IDS and text.decode(IDS) == PROMPT and text.step(IDS[0]) == "w5"
