"""Convert text to tokens and back, with the library tokenizers."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from splitc.runtime.errors import MisuseError, blamed, needed
from splitc.runtime.files.written import check_regular
from splitc.runtime.generate.endings import find_endings
from splitc.runtime.units import shortened

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
        """The tokens that end a text, by the files beside the tokenizer. Raises as `endings.find_endings`."""
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
