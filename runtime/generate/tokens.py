"""Generate tokens with a package of a language model."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Generator, Sequence
from dataclasses import dataclass, fields
from typing import Any

import numpy.typing as npt

from splitc.runtime.errors import MisuseError
from splitc.runtime.generate.capacity import USUAL, count_tokens
from splitc.runtime.generate.conversation import Conversation, ModelRunner
from splitc.runtime.generate.feeder import check_tokens
from splitc.runtime.generate.sampling import Sampling, choose_token, random_numbers
from splitc.runtime.generate.signature import find_signature, need_tokens

# Changes the logits of the next token, [vocabulary], given all tokens so far, the prompt's among them.
Rule = Callable[[npt.NDArray[Any], Sequence[int]], npt.NDArray[Any]]

# Default number of tokens of a prompt in one run (--prompt-chunk). A choice: the activations of a run grow with it, and
# with fewer, the weights are read more often.
PROMPT_CHUNK = 512
# Why a generator of tokens ended: at a stop token, at `max_new_tokens`, or where the model has room for no more.
STOP, LIMIT, ROOM = "stop", "limit", "room"


@dataclass
class Timings:
    """Tokens and seconds of the prompt, tokens and seconds after the first new token, and seconds of the encoder."""

    prompt_tokens: int = 0
    prompt_seconds: float = 0.0
    tokens: int = 0
    seconds: float = 0.0
    encoder_seconds: float = 0.0

    def add(self, more: Timings) -> None:
        """Add those of another text."""
        for field in fields(self):
            setattr(self, field.name, getattr(self, field.name) + getattr(more, field.name))


def generate(
    session: ModelRunner,
    prompt: npt.ArrayLike,
    *,
    max_new_tokens: int | None = None,
    sampling: Sampling = Sampling(),
    stop_tokens: Collection[int] = (),
    other_stop_tokens: Collection[int] = (),
    prompt_chunk: int = PROMPT_CHUNK,
    prefill: ModelRunner | None = None,
    timings: Timings | None = None,
    rules: Rule | None = None,
) -> Generator[int, None, str]:
    """Yield the ids of the tokens that follow a prompt's, without the stop token that ends them.

    - `max_new_tokens`: by default 100, or fewer if the model has no room for more.
    - `stop_tokens`: end the text. Without them `other_stop_tokens` do, which may include ids that the model lacks.
    - `prompt_chunk`: the tokens of a long prompt in one run.
    - `prefill`: runs the whole prompt instead: a session of a model that makes caches but takes none.
    - `timings`: is filled meanwhile. `rules`: change the logits before a token is chosen.

    Returns STOP, LIMIT or ROOM. Caches stay on the ranks; a model without states reads all tokens again for each new
    one. With the first token it raises MisuseError for an empty prompt, for more tokens than the model has room for,
    for a stop token that it never gives, and for a model that is no language model.
    """
    signature = find_signature(session.manifest, None if prefill is None else prefill.manifest)
    if prefill is not None and not session.manifest.states:
        raise MisuseError(
            f"{session.manifest.source.name} has no caches, so it reads all tokens each time: leave out the package "
            "for the prompt (--prefill)"
        )
    prompt = check_tokens(session.manifest, signature, prompt)
    need_tokens(session.manifest, signature.logits, stop_tokens)
    ends = stop_tokens or other_stop_tokens
    tokens = list(prompt)
    count = count_tokens(session.manifest, signature, len(prompt), max_new_tokens)
    timings = timings if timings is not None else Timings()
    generator = random_numbers(sampling)
    start = time.perf_counter()
    most = None if prefill is not None else len(prompt) + max(1, count) - 1
    conversation = Conversation(session, signature, len(prompt), most)
    try:
        logits = conversation.read_prompt(prompt, prompt_chunk, prefill)
        timings.prompt_tokens, timings.prompt_seconds = len(prompt), time.perf_counter() - start
        for number in range(count):
            token = choose_token(logits if rules is None else rules(logits, tokens), sampling, generator)
            if token in ends:
                return STOP
            yield token
            tokens.append(token)
            if number + 1 < count:
                start = time.perf_counter()
                logits = conversation.read([token])
                timings.tokens, timings.seconds = number + 1, timings.seconds + time.perf_counter() - start
        return ROOM if max_new_tokens is None and count < USUAL else LIMIT
    finally:
        conversation.close()
