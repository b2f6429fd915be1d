"""Answers of OpenAI's endpoints, as clients read them."""

from __future__ import annotations

import secrets
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from splitc.runtime.serving.texts import Written
from splitc.runtime.serving.tool_calls import Message

Chances = Sequence[Sequence[tuple[str, float]]]


@dataclass
class Reply:
    """The forms of the answers to one request: of a chat, or of a text that is continued. Some may have `chances`."""

    model: str
    chat: bool
    prompt_tokens: int
    written: Sequence[Written]
    has_chances: bool = False
    created: int = field(default_factory=lambda: int(time.time()))
    id: str = field(default_factory=lambda: secrets.token_hex(12))

    def whole(self, messages: Sequence[Message]) -> dict[str, Any]:
        """The answers at once."""
        choices = [
            self._choice(
                number, self._own(message), self._finish(number, message), written.passed_on(message.text, True)
            )
            for number, (message, written) in enumerate(zip(messages, self.written, strict=True))
        ]
        return {**self._head(""), "choices": choices, "usage": self._usage()}

    def piece(self, number: int, text: str, first: bool) -> bytes:
        """An event with some of the text of an answer."""
        role = {"role": "assistant"} if first else {}
        own: dict[str, Any] = {"delta": {**role, "content": text}} if self.chat else {"text": text}
        chances = self.written[number].passed_on(text)
        return _event({**self._head(".chunk"), "choices": [self._choice(number, own, None, chances)]})

    def end(self, number: int, message: Message | None = None) -> bytes:
        """The last event of an answer, with its calls of tools."""
        calls = [{"index": place, **call} for place, call in enumerate(message.calls)] if message else []
        own: dict[str, Any] = {"delta": {"tool_calls": calls} if calls else {}} if self.chat else {"text": ""}
        rest = self.written[number].passed_on("", True)
        return _event(
            {**self._head(".chunk"), "choices": [self._choice(number, own, self._finish(number, message), rest)]}
        )

    def ends(self, with_usage: bool) -> Iterator[bytes]:
        """The events after all answers."""
        if with_usage:
            yield _event({**self._head(".chunk"), "choices": [], "usage": self._usage()})
        yield b"data: [DONE]\n\n"

    def _head(self, chunk: str) -> dict[str, Any]:
        what, kind = ("chatcmpl", f"chat.completion{chunk}") if self.chat else ("cmpl", "text_completion")
        return {"id": f"{what}-{self.id}", "object": kind, "created": self.created, "model": self.model}

    def _own(self, message: Message) -> dict[str, Any]:
        if not self.chat:
            return {"text": message.text}
        if not message.calls:
            return {"message": {"role": "assistant", "content": message.text}}
        return {"message": {"role": "assistant", "content": message.text or None, "tool_calls": list(message.calls)}}

    def _finish(self, number: int, message: Message | None) -> str:
        return "tool_calls" if message is not None and message.calls else self.written[number].finish

    def _choice(self, number: int, own: dict[str, Any], finish: str | None, chances: Chances) -> dict[str, Any]:
        told = {"content": [_told(likely) for likely in chances]} if self.has_chances else None
        return {"index": number, **own, "logprobs": told, "finish_reason": finish}

    def _usage(self) -> dict[str, int]:
        prompt, new = self.prompt_tokens, sum(written.tokens for written in self.written)
        return {"prompt_tokens": prompt, "completion_tokens": new, "total_tokens": prompt + new}


def _told(likely: Sequence[tuple[str, float]]) -> dict[str, Any]:
    """A token's log probability, and those of the likeliest ones in its place."""
    (own, *others) = ({"token": text, "logprob": log, "bytes": list(text.encode())} for text, log in likely)
    return {**own, "top_logprobs": others}


def card(name: str) -> dict[str, Any]:
    """The description of a model."""
    return {"id": name, "object": "model", "created": 0, "owned_by": "splitc"}


def failure(message: str, kind: str, code: str | None = None, field: str | None = None) -> dict[str, Any]:
    """An error, which may be that of a field."""
    return {"error": {"message": message, "type": kind, "param": field, "code": code}}


def failure_event(message: str) -> bytes:
    """An error after the answer has begun."""
    return _event(failure(message, "server_error"))


def _event(content: dict[str, Any]) -> bytes:
    return b"data: " + msgspec.json.encode(content) + b"\n\n"
