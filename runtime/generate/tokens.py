"""Generate tokens with a package of a language model."""

from __future__ import annotations

import reprlib
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, fields
from numbers import Integral
from typing import Any

import numpy as np
import numpy.typing as npt

from splitc.runtime.arrays.array import number_type
from splitc.runtime.errors import MisuseError
from splitc.runtime.generate.conversation import Conversation, ModelRunner
from splitc.runtime.generate.room import count_tokens
from splitc.runtime.generate.sampling import Sampling, choose_token
from splitc.runtime.generate.signature import LanguageSignature, find_signature
from splitc.runtime.package.manifest import Manifest

# Logits of the next token, [vocabulary], as they shall be after these tokens, the prompt's among them.
Rule = Callable[[npt.NDArray[Any], Sequence[int]], npt.NDArray[Any]]

# Default number of tokens of a prompt in one run.
PROMPT_CHUNK = 512


@dataclass
class Timings:
    """Numbers of tokens and seconds, of the prompt and of the generated tokens after the first.

    `encoder_seconds` are those of an encoder before that.
    """

    prompt_tokens: int = 0
    prompt_seconds: float = 0.0
    tokens: int = 0
    seconds: float = 0.0
    encoder_seconds: float = 0.0

    def add(self, more: Timings) -> None:
        """Add those of another text."""
        for each in fields(self):
            setattr(self, each.name, getattr(self, each.name) + getattr(more, each.name))


def generate(
    session: ModelRunner,
    prompt: npt.ArrayLike,
    *,
    max_new_tokens: int | None = None,
    sampling: Sampling = Sampling(),
    stop_tokens: Collection[int] = (),
    prompt_chunk: int = PROMPT_CHUNK,
    prefill: ModelRunner | None = None,
    timings: Timings | None = None,
    rules: Rule | None = None,
) -> Iterator[int]:
    """Generate tokens after those of the prompt, one by one, up to a stop token, which is not given.

    Without `max_new_tokens` they are 100, or fewer if the model has no room for more. The caches stay on the ranks. A
    long prompt is run in chunks, or by the package `prefill`: a model that makes caches but takes none, which exporters
    write beside the decoder. A model without states gets all tokens again for each new one. `timings` is filled
    meanwhile. `rules` change the logits before a token is chosen. Raises MisuseError for an empty prompt, for more
    tokens than the model has room for, and for a model that is no language model.
    """
    signature = find_signature(session.manifest, None if prefill is None else prefill.manifest)
    if prefill is not None and not session.manifest.states:
        raise MisuseError(
            f"{session.manifest.source.name} has no caches, so it reads all tokens each time: leave out the package "
            "for the prompt (--prefill)"
        )
    prompt = _check_prompt(session.manifest, signature, prompt)
    tokens = list(prompt)
    count = count_tokens(session.manifest, signature, len(prompt), max_new_tokens)
    timings = timings if timings is not None else Timings()
    generator = np.random.default_rng(sampling.seed)
    start = time.perf_counter()
    most = None if prefill is not None else len(prompt) + max(1, count) - 1
    conversation = Conversation(session, signature, len(prompt), most)
    try:
        if prefill is not None:
            logits = conversation.read_prompt_with(prefill, prompt)
        else:
            logits = conversation.read_prompt(prompt, prompt_chunk)
        timings.prompt_tokens, timings.prompt_seconds = len(prompt), time.perf_counter() - start
        for number in range(count):
            token = choose_token(logits if rules is None else rules(logits, tokens), sampling, generator)
            if token in stop_tokens:
                return
            yield token
            tokens.append(token)
            if number + 1 < count:
                start = time.perf_counter()
                logits = conversation.read([token])
                timings.tokens, timings.seconds = number + 1, timings.seconds + time.perf_counter() - start
    finally:
        conversation.close()


def _check_prompt(manifest: Manifest, signature: LanguageSignature, prompt: npt.ArrayLike) -> list[int]:
    """The prompt's tokens. Raises MisuseError if there are none, or some that the model does not know."""
    array = np.asarray(prompt, object)
    if not array.size:
        raise MisuseError("the prompt has no tokens")
    wrong = [each for each in array.flat if not isinstance(each, Integral) or isinstance(each, bool)]
    if array.ndim != 1 or wrong:
        what = f"has {reprlib.repr(wrong[0])}" if array.ndim == 1 else f"is an array of shape {list(array.shape)}"
        raise MisuseError(f"a prompt is a list of the numbers of tokens, and this one {what}")
    tokens = list(map(int, array))
    ids = next(tensor for tensor in manifest.inputs if tensor.name == signature.ids)
    known, types = ids.role.rows if ids.role is not None else 0, number_type(ids.dtype)
    most = known or (np.iinfo(types).max + 1 if types.kind in "iu" else None)
    if unknown := [token for token in tokens if token < 0 or (most is not None and token >= most)]:
        has = f"has a vocabulary of {known}" if known else f"takes numbers from 0, of type {types}"
        raise MisuseError(f"the prompt has the token {unknown[0]}, and the model {has}")
    return tokens
