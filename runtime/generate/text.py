"""Convert text to tokens and back, with the library tokenizers."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from splitc.runtime.errors import MisuseError

# The files beside a tokenizer that say which token ends a text, and the keys in them.
CONFIGS = ("generation_config.json", "config.json", "tokenizer_config.json")
ENDINGS = ("eos_token_id", "eos_token")


@dataclass
class Text:
    """A tokenizer, the tokens that end a text, and a stream that decodes tokens one by one."""

    tokenizer: Any
    stop_tokens: list[int]
    _stream: Any

    @staticmethod
    def load(path: Path) -> Text:
        """Read `tokenizer.json`, or the one in a folder. Raises MisuseError if it or the library is missing."""
        try:
            from tokenizers import Tokenizer
            from tokenizers.decoders import DecodeStream
        except ImportError:
            raise MisuseError("--tokenizer needs the library tokenizers: pip install 'splitc[generate]'") from None
        file = path / "tokenizer.json" if path.is_dir() else path
        if not file.is_file():
            raise MisuseError(f"no such tokenizer: {file}")
        try:
            tokenizer = Tokenizer.from_file(str(file))
        except Exception as error:  # the library's errors have no other base
            raise MisuseError(f"{file} is no tokenizer.json: {error}") from error
        return Text(tokenizer, _find_stops(tokenizer, file.parent), DecodeStream(skip_special_tokens=True))

    def encode(self, text: str) -> list[int]:
        """A text's token ids, including special ones that the tokenizer adds."""
        return list(self.tokenizer.encode(text).ids)

    def decode(self, tokens: Sequence[int]) -> str:
        """The text of tokens."""
        return str(self.tokenizer.decode(list(tokens)))

    def step(self, token: int) -> str:
        """The text that one more token adds; empty as long as a character is incomplete."""
        return self._stream.step(self.tokenizer, token) or ""


def _find_stops(tokenizer: Any, folder: Path) -> list[int]:
    """The tokens that end a text, from the files beside the tokenizer."""
    for name in CONFIGS:
        try:
            config = json.loads((folder / name).read_text(encoding="utf-8"))
        except (OSError, ValueError):
            continue
        for key in ENDINGS:
            found = config.get(key)
            token = tokenizer.token_to_id(found) if isinstance(found, str) else found
            if token is not None:
                return [each for each in (token if isinstance(token, list) else [token]) if isinstance(each, int)]
    return []


def read_prompt(text: Text | None, prompt: str | None, prompt_ids: str | None) -> list[int]:
    """The prompt as token ids. Raises MisuseError unless it is given once, as text with a tokenizer or as ids."""
    if (prompt is None) == (prompt_ids is None):
        raise MisuseError("give the prompt as --prompt with a --tokenizer, or as --prompt-ids 1,2,3")
    if prompt is not None:
        if text is None:
            raise MisuseError("--prompt needs a --tokenizer; without one, give --prompt-ids 1,2,3")
        return text.encode(prompt)
    try:
        return [int(each) for each in (prompt_ids or "").split(",")]
    except ValueError:
        raise MisuseError(f"can't read --prompt-ids {prompt_ids}: write whole numbers, as in 1,2,3") from None
