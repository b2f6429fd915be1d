"""Requests of OpenAI's endpoints, as clients send them."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
from msgspec import Struct

from splitc.runtime.errors import MisuseError
from splitc.runtime.units import shortened

# What would change an answer and is not there, with the values that change nothing.
REFUSED: Mapping[str, tuple[Any, ...]] = {
    "best_of": (1,),
    "functions": (),
    "function_call": (),
    "response_format": ({"type": "text"},),
    "logit_bias": (),
    "presence_penalty": (0,),
    "frequency_penalty": (0,),
    "echo": (False,),
    "suffix": ("",),
    "audio": (),
}
# The most answers to a request, and the most likeliest tokens that are told: OpenAI's limits.
MOST_CHOICES, MOST_LIKELIEST = 128, 20


class RequestError(MisuseError):
    """A request can't be answered because of one of its fields."""

    def __init__(self, field: str, message: str) -> None:
        super().__init__(message)
        self.field = field


class Part(Struct):
    """A part of a message."""

    type: str
    text: str = ""


class Called(Struct):
    """A function that the model calls, with JSON as its arguments."""

    name: str
    arguments: str = "{}"


class ToolCall(Struct):
    """A call in a message of the model's."""

    function: Called
    id: str = ""
    type: str = "function"


class Message(Struct):
    """A message of a conversation."""

    role: str
    content: str | list[Part] | None = None
    tool_calls: list[ToolCall] | None = None
    tool_call_id: str | None = None
    name: str | None = None


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
    n: int | None = None
    logprobs: bool | int | None = None
    top_logprobs: int | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None

    @property
    def most(self) -> int | None:
        """The most tokens of the answer. Raises RequestError for less than one."""
        most = self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens
        if most is not None and most < 1:
            raise RequestError("max_tokens", f"max_tokens {most}: it is 1 or more")
        return most

    @property
    def choices(self) -> int:
        """The number of answers. Raises RequestError for none and for too many."""
        count = 1 if self.n is None else self.n
        if not 1 <= count <= MOST_CHOICES:
            raise RequestError("n", f"n {count}: it is 1 to {MOST_CHOICES}")
        return count

    @property
    def likeliest(self) -> int | None:
        """The number of likeliest tokens to list at each token; None without log probabilities. Raises RequestError."""
        count = self.top_logprobs or 0
        if not 0 <= count <= MOST_LIKELIEST:
            raise RequestError("top_logprobs", f"top_logprobs {count}: it is 0 to {MOST_LIKELIEST}")
        if self.logprobs and not self.messages:
            raise RequestError(
                "logprobs", "'logprobs' of a completion is lacking here: ask for a chat, or leave it out"
            )
        if count and not self.logprobs:
            raise RequestError("top_logprobs", "top_logprobs needs logprobs: set it to true")
        return count if self.logprobs else None

    @property
    def offered(self) -> Sequence[dict[str, Any]]:
        """The tools that the model may call. Raises RequestError for a choice that it can't be held to."""
        if self.tool_choice not in (None, "auto", "none"):
            told = shortened(str(self.tool_choice))
            raise RequestError("tool_choice", f"'tool_choice' is {told}, which this server lacks: use auto or none")
        return [] if self.tool_choice == "none" else self.tools or []

    @property
    def stops(self) -> Sequence[str]:
        """The texts that end the answer."""
        return [self.stop] if isinstance(self.stop, str) else self.stop or []

    def conversation(self) -> list[dict[str, Any]]:
        """The messages as chat templates take them. Raises RequestError for parts that are no text."""
        return [_as_template_takes(message) for message in self.messages]


def read_asked(body: bytes, wanted: str) -> Asked:
    """Read a request, which has to have the field `wanted`. Raises MisuseError for what can't be answered."""
    try:
        content = msgspec.json.decode(body, type=dict[str, Any])
        for name, neutral in REFUSED.items():
            value = content.get(name)
            if value not in (None, [], {}, *neutral):
                raise RequestError(name, f"'{name}' is {shortened(str(value))}, which this server lacks: leave it out")
        asked = msgspec.convert({**content, "prompt": _only_prompt(content.get("prompt", ""))}, Asked)
    except (msgspec.MsgspecError, RecursionError) as error:
        place = re.search(r"at `\$\.(\w+)", str(error)) or re.search(r"field `(\w+)`", str(error))
        if place is None:
            raise MisuseError(f"can't read the request: {error}") from error
        raise RequestError(place[1], f"can't read the request: {error}") from error
    if not content.get(wanted):
        raise RequestError(wanted, f"the request has no '{wanted}'")
    return asked


def _only_prompt(prompt: Any) -> Any:
    """A prompt that a list holds alone, as some clients send it. Raises RequestError for several."""
    if not isinstance(prompt, list) or not any(isinstance(entry, (str, list)) for entry in prompt):
        return prompt
    if len(prompt) > 1:
        raise RequestError("prompt", f"'prompt' has {len(prompt)} prompts: send a request for each")
    return prompt[0]


def _as_template_takes(message: Message) -> dict[str, Any]:
    """A message for a chat template, which takes the arguments of calls as objects, not as JSON text."""
    taken: dict[str, Any] = {"role": message.role, "content": _text_of(message)}
    if message.tool_calls:
        taken["tool_calls"] = [
            {"id": call.id, "type": call.type, "function": {"name": call.function.name, "arguments": _arguments(call)}}
            for call in message.tool_calls
        ]
    more = {"tool_call_id": message.tool_call_id, "name": message.name}
    return taken | {key: value for key, value in more.items() if value is not None}


def _arguments(call: ToolCall) -> Any:
    try:
        return msgspec.json.decode(call.function.arguments)
    except (msgspec.DecodeError, RecursionError) as error:
        named = f"the arguments of the call of '{call.function.name}'"
        raise RequestError("messages", f"{named} are no JSON: {error}") from error


def _text_of(message: Message) -> str:
    if message.content is None or isinstance(message.content, str):
        return message.content or ""
    if other := [part.type for part in message.content if part.type != "text"]:
        raise RequestError("messages", f"a message has a part of type '{other[0]}', and the model reads text only")
    return "".join(part.text for part in message.content)
