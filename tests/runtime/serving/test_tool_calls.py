"""Calls of tools, read by transformers' tokenizers. `make test-serving` runs what needs them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from splitc.runtime.serving.tool_calls import Message, read_calls, why_no_tools
from tests.helpers.texts import write_chat_tokenizer

TOOLS = [{"type": "function", "function": {"name": "add", "parameters": {"properties": {"a": {"type": "integer"}}}}}]
KNOWN = "{{ tools }}<tool_call>{{ call | tojson }}</tool_call>"
OWN = {
    "start_anchor": "ANSWER",
    "fields": {"content": {}, "tool_calls": {"open": "CALL ", "content": "json", "repeats": True}},
}


class Tokenizer:
    """One of a transformers that reads no calls."""

    def __init__(self, template: str) -> None:
        self.chat_template = template


def opened(folder: Path) -> Any:
    transformers = pytest.importorskip("transformers")
    tokenizer = transformers.PreTrainedTokenizerFast.from_pretrained(str(write_chat_tokenizer(folder / "tokenizer")))
    if not hasattr(tokenizer, "parse_response"):
        pytest.skip("needs a transformers that reads answers")
    return tokenizer


@pytest.mark.parametrize(
    ("template", "why"), [("{{ messages }}", "offers no tools"), ("{{ tools }}", "pip install --upgrade transformers")]
)
def test_why_tools_can_not_be_used(template: str, why: str) -> None:
    assert why in (why_no_tools(Tokenizer(template)) or "")


def test_calls_in_the_known_form(tmp_path: Path) -> None:
    tokenizer = opened(tmp_path)
    tokenizer.chat_template = "{{ tools }}"
    assert "no form of calls that is known" in (why_no_tools(tokenizer) or "")
    tokenizer.chat_template = f"{KNOWN}<function=NAME>"
    assert why_no_tools(tokenizer) is not None
    tokenizer.chat_template = KNOWN
    assert why_no_tools(tokenizer) is None
    calls = [{"name": name, "arguments": {"a": 1}} for name in ("add", "sub")]
    text = "Well: " + " ".join(f"<tool_call>\n{json.dumps(call)}\n</tool_call>" for call in calls)
    message = read_calls(tokenizer, "<tool_call>{}</tool_call> before", text, TOOLS)
    assert message.text.strip() == "Well:"
    assert [(call["type"], json.loads(call["function"]["arguments"])) for call in message.calls] == [
        ("function", {"a": 1})
    ] * 2
    assert [call["function"]["name"] for call in message.calls] == ["add", "sub"]
    assert len({call["id"] for call in message.calls}) == 2
    for wrong in ("no call", '<tool_call>{"name": "ad', '<tool_call>["add"]</tool_call>', "<tool_call>{}</tool_call>"):
        assert read_calls(tokenizer, "", wrong, TOOLS) == Message(wrong)


def test_calls_by_the_tokenizers_own_response_template(tmp_path: Path) -> None:
    tokenizer = opened(tmp_path)
    tokenizer.chat_template, tokenizer.response_template = "{{ tools }}", OWN
    assert why_no_tools(tokenizer) is None
    message = read_calls(tokenizer, "ANSWER ", 'CALL {"name": "add", "arguments": {"a": "3"}}', TOOLS)
    assert json.loads(message.calls[0]["function"]["arguments"]) in ({"a": "3"}, {"a": 3})
