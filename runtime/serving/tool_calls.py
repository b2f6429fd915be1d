"""Calls of tools in a model's output, parsed by transformers."""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

# How most models write a call, by their chat templates: JSON between these two. It is what a response template says of
# it. Those that have other markup within do not.
CALL, END, MARKUP = "<tool_call>", "</tool_call>", "<function="
WRITTEN_SO = {
    "start_anchor": CALL,  # one is demanded, and no prompt is given
    "fields": {
        "content": {"repeats": True, "join": ""},
        "tool_calls": {"open": CALL, "close": END, "content": "json", "repeats": True, "transform": "{content}"},
    },
}


@dataclass(frozen=True)
class Message:
    """An answer: its text, and calls in OpenAI's form."""

    text: str
    calls: Sequence[Mapping[str, Any]] = ()


def why_no_tools(tokenizer: Any) -> str | None:
    """Why transformers' tokenizer can't parse calls of tools; None if it can."""
    if "tools" not in str(tokenizer.chat_template):
        return "the model's chat template offers no tools to it"
    if not hasattr(tokenizer, "parse_response"):
        return "the transformers that is installed reads no calls of tools: pip install --upgrade transformers"
    if getattr(tokenizer, "response_template", None) is None and not _writes_so(tokenizer):
        return "its tokenizer has no response_template, and its chat template no form of calls that is known"
    return None


def read_calls(tokenizer: Any, prompt: str, text: str, tools: Sequence[Mapping[str, Any]]) -> Message:
    """Parse the output after a prompt, special tokens included. Malformed calls stay text."""
    own = getattr(tokenizer, "response_template", None)
    try:
        if own is not None:
            message = tokenizer.parse_response(text, prefix=prompt, tools=list(tools))
        else:
            message = tokenizer.parse_response(text, WRITTEN_SO, prefix="", tools=list(tools))
        return Message(str(message.get("content") or ""), [_as_openai_has(call) for call in message["tool_calls"]])
    except (ValueError, KeyError, TypeError, AttributeError):  # no calls, or one that the model wrote wrong
        return Message(text)


def _writes_so(tokenizer: Any) -> bool:
    template = str(tokenizer.chat_template)
    return CALL in template and END in template and MARKUP not in template


def _as_openai_has(call: Mapping[str, Any]) -> Mapping[str, Any]:
    function = call.get("function", call)
    arguments = function.get("arguments", {})
    written = arguments if isinstance(arguments, str) else msgspec.json.encode(arguments).decode()
    return {
        "id": f"call_{secrets.token_hex(12)}",
        "type": "function",
        "function": {"name": function["name"], "arguments": written},
    }
