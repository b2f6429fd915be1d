"""Texts of a served package: prompts become tokens, and answers come in pieces."""

from __future__ import annotations

import secrets
import threading
from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from splitc.runtime.errors import MisuseError, blamed, needed
from splitc.runtime.files.written import read_config
from splitc.runtime.generate.capacity import USUAL_CONTEXT, find_capacity
from splitc.runtime.generate.package_configs import understood
from splitc.runtime.generate.sampling import Chances, Sampling
from splitc.runtime.generate.signature import find_signature
from splitc.runtime.generate.text import StopTexts, Text
from splitc.runtime.generate.tokens import STOP
from splitc.runtime.session.session import Session

# transformers finds its names when they are imported, and not for two threads at once: models are loaded together.
_IMPORTING = threading.Lock()
NEEDS = "chat templates need transformers and Jinja: pip install 'splitc[openai]'"


class TooLongError(MisuseError):
    """A prompt and its answer have more tokens than there is room for."""


@dataclass(frozen=True)
class Question:
    """A prompt, and how it is answered: with at most `most` tokens, and up to one of the texts `stops`.

    With `likeliest`, each token's log probability is kept, and those of so many likeliest ones. With `special`, the
    answer has special tokens too.
    """

    prompt: Sequence[int]
    most: int
    sampling: Sampling
    stops: Sequence[str] = ()
    likeliest: int | None = None
    special: bool = False


@dataclass
class Written:
    """What was written of an answer: its tokens, and whether it ended by itself (`stop`) or for want of room.

    With `cut`, one of the stop texts ended it. `chances` are the tokens' own texts with their log probabilities, and
    those of the likeliest ones in their places. Each has the place in the answer where its text begins.
    """

    tokens: int = 0
    finish: str = "length"
    cut: bool = False
    chances: list[tuple[int, Sequence[tuple[str, float]]]] = field(default_factory=list)
    _length: int = 0

    def passed_on(self, text: str, last: bool = False) -> Sequence[Sequence[tuple[str, float]]]:
        """The chances of the tokens of a text that was passed on, which follows those before."""
        self._length += len(text)
        count = sum((last and not self.cut) or place < self._length for place, _ in self.chances)
        taken, self.chances = self.chances[:count], self.chances[count:]
        return [chances for _, chances in taken]


class Texts:
    """The tokenizer of a model, its chat template and its configs, from a folder.

    `context` is the most tokens of a prompt with its answer. Raises MisuseError for a folder without a tokenizer.
    """

    def __init__(self, folder: Path, context: int | None) -> None:
        self._text, self._context = Text.load(folder), context
        self._ends = self._text.find_endings()
        self.templates = _load_templates(folder)
        config = folder / "generation_config.json"
        self._config = read_config(config) if config.exists() else {}

    def write_chat(self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]]) -> str:
        """The prompt of a conversation. Raises MisuseError without a template, and for what the template refuses."""
        if not self.templates.chat_template:
            raise MisuseError("the model's tokenizer has no chat template: ask for completions of a text instead")
        how = {"tools": list(tools) or None, "add_generation_prompt": True, "tokenize": False}
        with blamed("the model's chat template refuses these messages"):  # which is a program of the model's author
            return str(self.templates.apply_chat_template(list(messages), **how))

    def read_text(self, text: str, special: bool = True) -> list[int]:
        """The tokens of a text, with those that the tokenizer adds if `special`."""
        return self._text.encode(text, special)

    def count(self, session: Session, prompt: int, asked: int | None) -> int:
        """The most tokens of an answer: `asked`, or as many as there is room for. Raises TooLongError for more."""
        capacity = find_capacity(session.manifest, find_signature(session.manifest))
        # The last token is not read again.
        rooms = [self._context, None if capacity is None else capacity + 1]
        room = min((room for room in rooms if room is not None), default=USUAL_CONTEXT)
        most = room - prompt
        if most < 1:
            raise TooLongError(f"the model has room for {room} tokens, and the prompt has {prompt}: shorten it")
        if asked is not None and asked > most:
            raise TooLongError(
                f"the model has room for {room} tokens, and the prompt has {prompt}: ask for {most} more at most, not "
                f"{asked}"
            )
        return most if asked is None else asked

    def sampling(self, temperature: float | None, top_p: float | None, top_k: int | None, seed: int | None) -> Sampling:
        """How to choose tokens: as asked, or else by the model's generation config, or else all of them as they are."""
        with understood("the model's generation_config.json"):
            usual = {"temperature": 1.0, "top_k": 0, "top_p": 1.0}
            config = usual | {key: value for key, value in self._config.items() if value is not None}
            own = float(config["temperature"]), int(config["top_k"]), float(config["top_p"])
        asked = (temperature, top_k, top_p)
        heat, among, total = (mine if given is None else given for given, mine in zip(asked, own, strict=True))
        return Sampling(float(heat), int(among), float(total), secrets.randbits(32) if seed is None else seed)

    def write(self, session: Session, question: Question, written: Written) -> Generator[str, None, None]:
        """Yield the answer, a piece for each token, which may be empty. `written` is filled meanwhile."""
        text, stops = self._text.again(question.special), StopTexts(question.stops)
        chances = None if question.likeliest is None else Chances()
        tokens = session.generate(
            question.prompt,
            max_new_tokens=question.most,
            sampling=question.sampling,
            other_stop_tokens=self._ends,
            rules=chances,
        )
        length = 0
        try:
            while not stops.ended:
                try:
                    token = next(tokens)
                except StopIteration as end:
                    written.finish = "stop" if end.value == STOP else "length"
                    yield stops.rest()
                    return
                written.tokens += 1
                if chances is not None:
                    likely = chances.of(token, question.likeliest or 0)
                    written.chances.append((length, [(self._text.decode([one], True), log) for one, log in likely]))
                piece = text.step(token)
                length += len(piece)
                yield stops.take(piece)
            written.finish, written.cut = "stop", True
        finally:
            tokens.close()


def _load_templates(folder: Path) -> Any:
    """transformers' tokenizer of the folder, for its chat template."""
    with needed(NEEDS), _IMPORTING:
        import jinja2  # noqa: F401  # which templates need, and transformers does not
        from transformers import PreTrainedTokenizerFast
    with blamed(f"transformers can't read the tokenizer of {folder}"):
        return PreTrainedTokenizerFast.from_pretrained(str(folder))
