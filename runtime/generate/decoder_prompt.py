"""The tokens that a decoder of an encoder begins with, by the generation config."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from splitc.runtime.arrays.array import Array
from splitc.runtime.errors import MisuseError


def find_prompt(
    config: Mapping[str, Any], language: str | None, task: str | None, logits_after: Callable[[list[int]], Array]
) -> list[int]:
    """The decoder's first tokens: the start, the forced ones, and those of a language and a task if the model has such.

    Without a language, it is the likeliest one by `logits_after`, which gives the logits of the next token after some.
    Raises MisuseError for a language or task that the model does not have, and without a token to start with.
    """
    start = config.get("decoder_start_token_id", config.get("bos_token_id"))
    if not isinstance(start, int):
        raise MisuseError("no config of the package has decoder_start_token_id, which the decoder begins with")
    languages, tasks = config.get("lang_to_id") or {}, config.get("task_to_id") or {}
    named = {**languages, **{key.strip("<|>"): token for key, token in languages.items()}}
    for option, value, known in (("--language", language, named), ("--task", task, tasks)):
        if value is not None and value not in known:
            names = ", ".join(sorted(key for key in known if not key.startswith("<|"))) or "none"
            raise MisuseError(f"{option} {value}: the model's generation_config.json has {names}")
    forced = dict(map(tuple, config.get("forced_decoder_ids") or ())) if language is None and task is None else {}
    prompt: list[int | None] = [start]
    while len(prompt) in forced:
        prompt.append(forced[len(prompt)])
    if not languages:
        return [token for token in prompt if token is not None]
    if len(prompt) == 1 or prompt[1] is None:
        spoken = named[language] if language is not None else _likeliest(logits_after([start]), languages)
        prompt[1:2] = [spoken]
    if tasks and not set(tasks.values()) & set(prompt):
        prompt.append(tasks[task or "transcribe"])
    silent = config.get("no_timestamps_token_id")
    if silent is not None and prompt[-1] != silent:
        prompt.append(silent)
    return [token for token in prompt if token is not None]


def _likeliest(logits: Array, languages: Mapping[str, int]) -> int:
    tokens = list(languages.values())
    return tokens[int(np.argmax(logits[tokens]))]
