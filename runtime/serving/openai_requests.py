"""Requests of OpenAI's endpoints, as clients send them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
from msgspec import Struct

from splitc.runtime.errors import MisuseError
from splitc.runtime.units import shortened

# What would change an answer and is not there, with the values that change nothing.
REFUSED: Mapping[str, tuple[Any, ...]] = {
    "n": (1,),
    "best_of": (1,),
    "tools": (),
    "functions": (),
    "response_format": ({"type": "text"},),
    "logprobs": (False, 0),
    "top_logprobs": (0,),
    "logit_bias": (),
    "presence_penalty": (0,),
    "frequency_penalty": (0,),
    "echo": (False,),
    "suffix": ("",),
    "audio": (),
}


class Part(Struct):
    """A part of a message."""

    type: str
    text: str = ""


class Message(Struct):
    """A message of a conversation."""

    role: str
    content: str | list[Part] | None = None


class StreamOptions(Struct):
    """What a stream has besides the text."""

    include_usage: bool = False


class Asked(Struct):
    """A request: `messages` of a chat, or a `prompt` that is continued. What is None is for the model to say."""

    model: str
    messages: list[Message] = []
    prompt: str | list[int] = ""
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    seed: int | None = None
    stop: str | list[str] | None = None

    @property
    def most(self) -> int | None:
        """The most tokens of the answer. Raises MisuseError for less than one."""
        most = self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens
        if most is not None and most < 1:
            raise MisuseError(f"max_tokens {most}: it is 1 or more")
        return most

    @property
    def stops(self) -> Sequence[str]:
        """The texts that end the answer."""
        return [self.stop] if isinstance(self.stop, str) else self.stop or []

    def conversation(self) -> list[dict[str, str]]:
        """The messages with their texts. Raises MisuseError for parts that are no text."""
        return [{"role": message.role, "content": _text_of(message)} for message in self.messages]


def read_asked(body: bytes, wanted: str) -> Asked:
    """Read a request, which has to have the field `wanted`. Raises MisuseError for what can't be answered."""
    try:
        content = msgspec.json.decode(body, type=dict[str, Any])
        for name, neutral in REFUSED.items():
            value = content.get(name)
            if value not in (None, [], {}, *neutral):
                raise MisuseError(f"'{name}' is {shortened(str(value))}, which this server lacks: leave it out")
        asked = msgspec.convert(content, Asked)
    except msgspec.MsgspecError as error:
        raise MisuseError(f"can't read the request: {error}") from error
    if not content.get(wanted):
        raise MisuseError(f"the request has no '{wanted}'")
    return asked


def _text_of(message: Message) -> str:
    if message.content is None or isinstance(message.content, str):
        return message.content or ""
    if other := [part.type for part in message.content if part.type != "text"]:
        raise MisuseError(f"a message has a part of type '{other[0]}', and the model reads text only")
    return "".join(part.text for part in message.content)
