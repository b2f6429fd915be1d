"""The contents of model folders that answer OpenAI's requests, and how such requests are read."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from splitc.runtime.errors import MisuseError
from splitc.runtime.serving.openai_requests import REFUSED, RequestError, read_asked
from splitc.runtime.serving.serving_file import read_serving
from tests.helpers.command import splitc
from tests.helpers.texts import write_chat_tokenizer


def test_package_becomes_a_model_with_its_tokenizer(package: Path, tmp_path: Path) -> None:
    tokenizer = write_chat_tokenizer(tmp_path / "tokenizer")
    (tokenizer / "model.safetensors").write_bytes(b"weights")
    splitc("export", "openai", package, "-o", tmp_path / "models", "--tokenizer", tokenizer, "--context", 64)
    folder = tmp_path / "models" / package.name
    assert json.loads((tmp_path / "models" / "settings.json").read_text()) == {"parallel_workers": 0}
    settings = json.loads((folder / "model-settings.json").read_text())
    assert settings["implementation"] == "splitc.runtime.serving.openai_model.OpenAIModel"
    serving = read_serving(folder / "serving.json")
    assert (serving.sequences, serving.tokenizer, serving.context) == (False, "tokenizer", 64)
    copied = {path.name for path in (folder / "tokenizer").iterdir()}
    assert copied == {"tokenizer.json", "tokenizer_config.json", "generation_config.json"}


def test_tokenizer_that_travels_is_taken(decoder: Path, tmp_path: Path) -> None:
    source = write_chat_tokenizer(tmp_path / "source")
    for file in decoder.parent.glob(f"{decoder.name}*"):
        shutil.copy(file, source)
    splitc("compile", source, "-o", tmp_path / "package", "-d", "cpu0")
    splitc("export", "openai", tmp_path / "package", "-o", tmp_path / "models")
    (folder,) = (path for path in (tmp_path / "models").iterdir() if path.is_dir())
    assert {path.name for path in (folder / "tokenizer").iterdir()} >= {"tokenizer.json", "generation_config.json"}


def test_what_writes_no_texts_is_refused(package: Path, tmp_path: Path) -> None:
    export = ("export", "openai", package, "-o", tmp_path / "models")
    assert "no tokenizer.json travels with" in splitc(*export, code=2).stderr
    assert "has no tokenizer.json" in splitc(*export, "--tokenizer", tmp_path, code=2).stderr
    (tmp_path / "tokenizer.json").write_text("{}")
    assert "is no tokenizer.json" in splitc(*export, "--tokenizer", tmp_path, code=2).stderr
    assert "--batch has no effect with 'openai'" in splitc(*export, "--batch", 2, code=2).stderr
    assert not list((tmp_path / "models").glob("*"))


def read(wanted: str = "messages", **fields: Any) -> Any:
    message = {"role": "user", "content": "w1"}
    return read_asked(json.dumps({"model": "chat", "messages": [message], **fields}).encode(), wanted)


def test_requests_are_read() -> None:
    parts = [{"type": "text", "text": "one "}, {"type": "text", "text": "two"}]
    asked = read(messages=[{"role": "user", "content": parts}], max_tokens=3, stop="x", user="me", n=1, tools=[])
    assert asked.conversation() == [{"role": "user", "content": "one two"}]
    assert (asked.most, asked.stops, asked.temperature) == (3, ["x"], None)
    assert (asked.choices, asked.likeliest, asked.offered) == (1, None, [])
    assert read(logprobs=True, top_logprobs=2).likeliest == 2 and read(logprobs=True).likeliest == 0
    assert read(tools=[{"type": "function"}], tool_choice="none").offered == []
    assert read(max_tokens=3, max_completion_tokens=5, stop=None).most == 5
    assert read("prompt", prompt=[1, 2]).prompt == [1, 2]


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_lacking_is_refused_by_name(name: str) -> None:
    with pytest.raises(RequestError, match=f"'{name}' is .*lacks") as caught:
        read("messages", **{name: [{"a": 2}]})
    assert caught.value.field == name


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"messages": []}, "no 'messages'"),
        ({"messages": [{"content": "w1"}]}, "role"),
        ({"stop": 3}, "stop"),
        ({"model": None}, "model"),
        ({"temperature": "hot"}, "temperature"),
    ],
)
def test_wrong_requests_name_the_field(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(RequestError, match=message) as caught:
        read(**fields)
    assert caught.value.field == next(iter(fields))
    for body in (b"{", b'{"model": ' + b"[" * 200_000):
        with pytest.raises(MisuseError, match="can't read the request"):
            read_asked(body, "messages")


@pytest.mark.parametrize(("sent", "read"), [(["w1 w2"], "w1 w2"), ([[5, 17]], [5, 17]), ([5, 17], [5, 17])])
def test_prompt_alone_in_a_list(sent: Any, read: Any) -> None:
    assert read_asked(json.dumps({"model": "chat", "prompt": sent}).encode(), "prompt").prompt == read


def test_several_prompts_are_refused() -> None:
    with pytest.raises(RequestError, match="'prompt' has 2 prompts: send a request for each"):
        read_asked(json.dumps({"model": "chat", "prompt": ["w1", "w2"]}).encode(), "prompt")


def test_parts_that_are_no_text_are_refused() -> None:
    with pytest.raises(MisuseError, match="'image_url'"):
        read(messages=[{"role": "user", "content": [{"type": "image_url"}]}]).conversation()
    with pytest.raises(RequestError, match="arguments of the call of 'f' are no JSON"):
        call = {"function": {"name": "f", "arguments": "{"}}
        read(messages=[{"role": "assistant", "tool_calls": [call]}]).conversation()
    with pytest.raises(RequestError, match="are no JSON: maximum recursion depth"):
        call = {"function": {"name": "f", "arguments": "[" * 200_000}}
        read(messages=[{"role": "assistant", "tool_calls": [call]}]).conversation()
    for fields, name in (
        ({"n": 0}, "choices"),
        ({"n": 200}, "choices"),
        ({"logprobs": True, "top_logprobs": 30}, "likeliest"),
        ({"top_logprobs": 2}, "likeliest"),
        ({"tool_choice": "required"}, "offered"),
    ):
        with pytest.raises(RequestError) as caught:
            getattr(read(**fields), name)
        assert caught.value.field == list(fields)[-1]
    with pytest.raises(MisuseError, match="max_tokens 0"):
        assert read(max_tokens=0).most
