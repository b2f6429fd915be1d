"""Convert text to tokens and back, with the library tokenizers: which tokens end a text, and which texts."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from splitc.runtime.errors import MisuseError, blamed, needed
from splitc.runtime.files.written import check_regular, read_config
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


# A token's number as users write it.
NUMBER = re.compile(r"\s*[+-]?[0-9]{1,30}\s*")


@dataclass
class Text:
    """A tokenizer from a file, and a stream that decodes tokens one by one."""

    tokenizer: Any
    file: Path
    _stream: Any

    @staticmethod
    def load(path: Path) -> Text:
        """Read `tokenizer.json`, or the one in a folder. Raises MisuseError if it or the library is missing."""
        with needed("--tokenizer needs the library tokenizers: pip install 'splitc[generate]'"):
            from tokenizers import Tokenizer
            from tokenizers.decoders import DecodeStream
        file = path / "tokenizer.json" if path.is_dir() else path
        if not file.exists():
            raise MisuseError(f"no such tokenizer: {file}")
        check_regular(file)
        with blamed(f"{file} is no tokenizer.json"):
            tokenizer = Tokenizer.from_file(str(file))
            # Files of encoders have these set for batches: a prompt has neither more nor less tokens than its text.
            tokenizer.no_padding()
            tokenizer.no_truncation()
            return Text(tokenizer, file, DecodeStream(skip_special_tokens=True))

    def find_endings(self) -> list[int]:
        """The tokens that end a text, by the files beside the tokenizer. Raises as `find_endings`."""
        return find_endings(self.file.parent, self._number_of)

    def _number_of(self, token: str) -> int | None:
        with blamed(f"{self.file} can't look up {token!a}"):
            number: int | None = self.tokenizer.token_to_id(token)
        return number

    def again(self, special: bool) -> Text:
        """The same tokenizer, for another text, in which special tokens are shown if `special`."""
        from tokenizers.decoders import DecodeStream

        return Text(self.tokenizer, self.file, DecodeStream(skip_special_tokens=not special))

    def encode(self, text: str, special: bool = True) -> list[int]:
        """A text's token ids, including special ones that the tokenizer adds if `special`.

        Raises MisuseError for a text with bytes that are no UTF-8, and for one that the tokenizer can't read.
        """
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise MisuseError(
                f"the prompt is no UTF-8: see {text[error.start]!a}, its character {error.start + 1}"
            ) from None
        with blamed(f"{self.file} can't read the prompt"):
            return list(self.tokenizer.encode(text, add_special_tokens=special).ids)

    def decode(self, tokens: Sequence[int], special: bool = False) -> str:
        """The text of tokens, special ones included if `special`."""
        with blamed(f"{self.file} can't decode tokens"):
            return str(self.tokenizer.decode(list(tokens), skip_special_tokens=not special))

    def step(self, token: int) -> str:
        """The text that one more token adds; empty as long as a character is incomplete."""
        with blamed(f"{self.file} can't decode the token {token}"):
            return self._stream.step(self.tokenizer, token) or ""


def read_prompt(text: Text | None, prompt: str | None, prompt_ids: str | None) -> list[int]:
    """The prompt as token ids. Raises MisuseError unless it is given once, as text with a tokenizer or as ids."""
    if (prompt is None) == (prompt_ids is None):
        raise MisuseError("give the prompt as --prompt with a --tokenizer, or as --prompt-ids 1,2,3")
    if prompt is not None:
        if text is None:
            raise MisuseError("--prompt needs a --tokenizer; without one, give --prompt-ids 1,2,3")
        return text.encode(prompt)
    given = (prompt_ids or "").split(",")
    if wrong := [word for word in given if not NUMBER.fullmatch(word)]:
        raise MisuseError(
            f"can't read --prompt-ids {shortened(prompt_ids or '')}: '{shortened(wrong[0])}' is no number of a token; "
            "write whole numbers, as in 1,2,3"
        )
    return list(map(int, given))


class StopTexts:
    """Takes pieces of text, and passes it on up to the first stop text. `ended`: a stop text came."""

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = [stop for stop in stops if stop]
        self._held = ""
        self.ended = False

    def take(self, piece: str) -> str:
        """The text that can be passed on after this piece."""
        text = self._held + piece
        places = [place for stop in self._stops if (place := text.find(stop)) >= 0]
        if places:
            self.ended, self._held = True, ""
            return text[: min(places)]
        held = max((_overlap(text, stop) for stop in self._stops), default=0)
        self._held = text[len(text) - held :]
        return text[: len(text) - held]

    def rest(self) -> str:
        """The text that was held back, at the end."""
        return self._held


def _overlap(text: str, stop: str) -> int:
    """The length of the longest suffix of the text that is a prefix of the stop text."""
    longest = min(len(text), len(stop) - 1)
    return next((length for length in range(longest, 0, -1) if text.endswith(stop[:length])), 0)
