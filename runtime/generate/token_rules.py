"""The tokens that a generation config permits: logits are changed before a token is chosen."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from splitc.runtime.errors import MisuseError

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
