"""Answers of OpenAI's endpoints, as clients read them."""

from __future__ import annotations

import secrets
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import msgspec

from splitc.runtime.serving.texts import Written


@dataclass
class Reply:
    """The forms of one answer: of a chat, or of a text that is continued."""

    model: str
    chat: bool
    prompt_tokens: int
    written: Written = field(default_factory=Written)
    created: int = field(default_factory=lambda: int(time.time()))
    id: str = field(default_factory=lambda: secrets.token_hex(12))

    def whole(self, text: str) -> dict[str, Any]:
        """The answer at once."""
        own = {"message": {"role": "assistant", "content": text}} if self.chat else {"text": text}
        return {**self._head(""), "choices": [self._choice(own, self.written.finish)], "usage": self._usage()}

    def piece(self, text: str, first: bool) -> bytes:
        """An event with some of the text."""
        role = {"role": "assistant"} if first else {}
        own: dict[str, Any] = {"delta": {**role, "content": text}} if self.chat else {"text": text}
        return _event({**self._head(".chunk"), "choices": [self._choice(own, None)]})

    def ends(self, with_usage: bool) -> Iterator[bytes]:
        """The last events."""
        own: dict[str, Any] = {"delta": {}} if self.chat else {"text": ""}
        yield _event({**self._head(".chunk"), "choices": [self._choice(own, self.written.finish)]})
        if with_usage:
            yield _event({**self._head(".chunk"), "choices": [], "usage": self._usage()})
        yield b"data: [DONE]\n\n"

    def _head(self, chunk: str) -> dict[str, Any]:
        what, kind = ("chatcmpl", f"chat.completion{chunk}") if self.chat else ("cmpl", "text_completion")
        return {"id": f"{what}-{self.id}", "object": kind, "created": self.created, "model": self.model}

    def _choice(self, own: dict[str, Any], finish: str | None) -> dict[str, Any]:
        return {"index": 0, **own, "logprobs": None, "finish_reason": finish}

    def _usage(self) -> dict[str, int]:
        prompt, new = self.prompt_tokens, self.written.tokens
        return {"prompt_tokens": prompt, "completion_tokens": new, "total_tokens": prompt + new}


def card(name: str) -> dict[str, Any]:
    """What is said of a model."""
    return {"id": name, "object": "model", "created": 0, "owned_by": "splitc"}


def failure(message: str, kind: str, code: str | None = None) -> dict[str, Any]:
    """An error."""
    return {"error": {"message": message, "type": kind, "param": None, "code": code}}


def failure_event(message: str) -> bytes:
    """An error after the answer has begun."""
    return _event(failure(message, "server_error"))


def _event(content: dict[str, Any]) -> bytes:
    return b"data: " + msgspec.json.encode(content) + b"\n\n"
