"""The first tokens of an encoder's decoder, by the generation config."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from operator import itemgetter
from typing import Any

import numpy as np

from splitc.runtime.arrays.array import Array
from splitc.runtime.errors import MisuseError


def find_prompt(
    config: Mapping[str, Any], language: str | None, task: str | None, logits_after: Callable[[list[int]], Array]
) -> list[int]:
    """The decoder's first tokens: the start, those that the config forces, and in a model of several languages one
    each for the language, the task and "no timestamps", where none is forced.

    `language` and `task` replace what is forced. Without a language it is the likeliest one by `logits_after`, which
    gives the logits, [vocabulary], of the next token. Raises MisuseError for a language or task that the model does not
    have, and if no config names the start.
    """
    start = config.get("decoder_start_token_id")
    if start is None:
        start = config.get("bos_token_id")
    if not isinstance(start, int):
        raise MisuseError(
            "no config of the package has decoder_start_token_id, which the decoder begins with: copy "
            "generation_config.json from the model that was exported into the exported folder, and compile that again"
        )
    languages, tasks = config.get("lang_to_id") or {}, config.get("task_to_id") or {}
    names = {**languages, **{key.strip("<|>"): token for key, token in languages.items()}}
    _check_choice("--language", language, names)
    _check_choice("--task", task, tasks)
    forced = config.get("forced_decoder_ids") or () if language is None and task is None else ()
    prompt = [start, *(token for _, token in sorted(forced, key=itemgetter(0)) if token is not None)]
    if not languages:
        return prompt
    if not set(prompt) & set(languages.values()):
        prompt.insert(1, names[language] if language is not None else _likeliest(logits_after([start]), languages))
    if tasks and not set(prompt) & set(tasks.values()):
        prompt.append(tasks[task or "transcribe"])
    silent = config.get("no_timestamps_token_id")
    if silent is not None and silent not in prompt:
        prompt.append(silent)
    return prompt


def _check_choice(option: str, name: str | None, known: Mapping[str, int]) -> None:
    """Raise MisuseError for a name that the config does not list."""
    if name is not None and name not in known:
        listed = ", ".join(sorted(key for key in known if not key.startswith("<|"))) or "none"
        raise MisuseError(f"{option} {name}: the model's generation_config.json has {listed}")


def _likeliest(logits: Array, languages: Mapping[str, int]) -> int:
    tokens = list(languages.values())
    return tokens[int(np.argmax(logits[tokens]))]
