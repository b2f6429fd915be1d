"""The tokens that end a text, from the files beside a tokenizer."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from splitc.runtime.errors import MisuseError
from splitc.runtime.files.written import read_config
from splitc.runtime.units import shortened

# The files that may name them, of which the first that does counts, and the keys.
CONFIGS = (
    *("genai_config.json", "generation_config.json", "config.json"),
    *("tokenizer_config.json", "special_tokens_map.json"),
)
KEYS = ("eos_token_id", "eos_token")
# Where onnxruntime-genai has them in its file.
INSIDE = "model"
# Where transformers lists tokens that were added to a tokenizer later.
ADDED = "added_tokens_decoder"

_ADVICE = "Name the token that ends a text by its id, as --stop 2"

# The number of a token; None if the tokenizer has no such token.
Lookup = Callable[[str], int | None]


def find_endings(folder: Path, lookup: Lookup) -> list[int]:
    """The tokens that end a text; none if no file names any. Raises MisuseError for a file that can't be understood."""
    for name in CONFIGS:
        if not os.path.lexists(file := folder / name):
            continue
        try:
            config = read_config(file)
        except MisuseError as error:
            raise MisuseError(f"{error}. {_ADVICE}") from error
        inside = config.get(INSIDE)
        for key in KEYS:
            value = config.get(key, inside.get(key) if isinstance(inside, dict) else None)
            if tokens := _tokens(file, key, value, _with_added(config, lookup)):
                return tokens
    return []


def _with_added(config: dict[str, Any], lookup: Lookup) -> Lookup:
    """The tokenizer's lookup, and after it that of the tokens that the file adds, by their numbers."""
    listed = config.get(ADDED)
    added = {
        token["content"]: int(number)
        for number, token in (listed.items() if isinstance(listed, dict) else ())
        if isinstance(token, dict) and isinstance(token.get("content"), str) and number.isdecimal()
    }
    return lambda token: number if (number := lookup(token)) is not None else added.get(token)


def _tokens(file: Path, key: str, value: Any, lookup: Lookup) -> list[int]:
    """The numbers of a token, or of a list of them, each given as a number, as text, or as an object with text."""
    tokens = []
    for entry in value if isinstance(value, list) else [value]:
        token = entry.get("content") if isinstance(entry, dict) else entry
        number = lookup(token) if isinstance(token, str) else token
        if number is None:  # not given, or not known to the tokenizer
            continue
        if not isinstance(number, int) or isinstance(number, bool):
            is_this = shortened(json.dumps(value))
            raise MisuseError(f"{file}: '{key}' should be the token that ends a text: it is {is_this}. {_ADVICE}")
        if number >= 0:  # some write -1 for none
            tokens.append(number)
    return tokens
