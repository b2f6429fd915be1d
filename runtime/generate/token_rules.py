"""What a generation config says: an encoder's decoder's first tokens, and those that are permitted after them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from operator import itemgetter
from typing import Any

import numpy as np
import numpy.typing as npt

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


Logits = npt.NDArray[Any]


@dataclass(frozen=True)
class TokenRules:
    """Rules of a generation config, for a prompt and at most `most` tokens with it.

    - `begin`: the first place that is not forced.
    - `forced`: the only permitted token at each place, counted from the first of the prompt.
    - `never`: sequences of tokens that must not occur.
    - `suppressed_first`: not permitted at the place `begin`.
    - `ends`: not permitted before there are `least` tokens.
    - `repeats`: no sequence of this many tokens may occur twice.
    - `penalty`: logits of tokens that have occurred are divided by it if they are positive, and multiplied if not.
    """

    begin: int
    forced: Mapping[int, int]
    never: Sequence[Sequence[int]]
    suppressed_first: Sequence[int]
    ends: Sequence[int]
    least: int = 0
    repeats: int = 0
    penalty: float = 1.0

    def __call__(self, logits: Logits, tokens: Sequence[int]) -> Logits:
        """The logits of the next token after `tokens`; minus infinity for tokens that are not permitted."""
        changed = logits.astype(np.float32)
        place = len(tokens)
        if place in self.forced:
            return _only(changed, self.forced[place])
        if self.penalty != 1.0:
            seen = np.unique([token for token in tokens if token < len(changed)]).astype(np.int64)
            changed[seen] = np.where(changed[seen] > 0, changed[seen] / self.penalty, changed[seen] * self.penalty)
        banned = {words[-1] for words in self.never if list(tokens[place - len(words) + 1 :]) == list(words[:-1])}
        if self.repeats:
            banned |= _would_repeat(tokens, self.repeats)
        if place < self.least:
            banned |= set(self.ends)
        if place == self.begin:
            banned |= set(self.suppressed_first)
        changed[[token for token in banned if 0 <= token < len(changed)]] = -np.inf
        return changed


def _only(logits: Logits, token: int) -> Logits:
    if not 0 <= token < len(logits):
        raise MisuseError(f"the generation config forces the token {token}, and the model has {len(logits)} of them")
    only = np.full_like(logits, -np.inf)
    only[token] = 0
    return only


def _would_repeat(tokens: Sequence[int], size: int) -> set[int]:
    """The tokens that would complete a repeated sequence of `size` tokens."""
    last = list(tokens[len(tokens) - size + 1 :])
    places = range(len(tokens) - size + 1)
    return {tokens[place + size - 1] for place in places if list(tokens[place : place + size - 1]) == last}


def read_rules(config: Mapping[str, Any], prompt: int, most: int, ends: Sequence[int]) -> TokenRules:
    """The rules of a generation config, for a prompt of this length and at most `most` tokens with it."""
    first = config.get("forced_bos_token_id") if prompt == 1 else None
    forced = {} if first is None else {1: int(first)}
    last = config.get("forced_eos_token_id")
    if last is not None:
        forced[most - 1] = int(last[0] if isinstance(last, list) else last)
    suppressed = [[int(token)] for token in config.get("suppress_tokens") or ()]
    bad = [[int(token) for token in words] for words in config.get("bad_words_ids") or () if words]
    bad = [words for words in bad if words not in [[end] for end in ends]]  # a text must be able to end
    least = max(int(config.get("min_length") or 0), prompt + int(config.get("min_new_tokens") or 0))
    return TokenRules(
        begin=prompt if first is None else prompt + 1,
        forced=forced,
        never=[*suppressed, *bad],
        suppressed_first=[int(token) for token in config.get("begin_suppress_tokens") or ()],
        ends=ends,
        least=least,
        repeats=max(0, int(config.get("no_repeat_ngram_size") or 0)),
        penalty=float(config.get("repetition_penalty") or 1.0),
    )
