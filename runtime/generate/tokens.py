"""Generate tokens with a package of a language model."""

from __future__ import annotations

import time
from collections.abc import Collection, Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from splitc.runtime.errors import MisuseError
from splitc.runtime.generate.conversation import Conversation, ModelRunner
from splitc.runtime.generate.sampling import Sampling, choose_token
from splitc.runtime.generate.signature import LanguageSignature, find_signature
from splitc.runtime.manifest import Manifest

# Default number of tokens of a prompt in one run.
PROMPT_CHUNK = 512


@dataclass
class Timings:
    """Numbers of tokens and seconds, of the prompt and of the generated tokens after the first."""

    prompt_tokens: int = 0
    prompt_seconds: float = 0.0
    tokens: int = 0
    seconds: float = 0.0


def generate(
    session: ModelRunner,
    prompt: npt.ArrayLike,
    *,
    max_new_tokens: int = 100,
    sampling: Sampling = Sampling(),
    stop_tokens: Collection[int] = (),
    prompt_chunk: int = PROMPT_CHUNK,
    prefill: ModelRunner | None = None,
    timings: Timings | None = None,
) -> Iterator[int]:
    """Generate tokens after those of the prompt, one by one, up to a stop token, which is not given.

    The caches stay on the ranks. A long prompt is run in chunks, or by the package `prefill`: a model that makes caches
    but takes none, which exporters write beside the decoder. A model without states gets all tokens again for each new
    one. `timings` is filled meanwhile. Raises MisuseError for an empty prompt, and for a model that is no language
    model.
    """
    signature = find_signature(session.manifest)
    prompt = _check_prompt(session.manifest, signature, prompt)
    timings = timings if timings is not None else Timings()
    generator = np.random.default_rng(sampling.seed)
    start = time.perf_counter()
    conversation = Conversation(session, signature, None if prefill is not None else len(prompt) + max_new_tokens)
    try:
        if prefill is not None and session.manifest.states:
            logits = conversation.read_prompt_with(prefill, prompt)
        else:
            logits = conversation.read_prompt(prompt, prompt_chunk)
        timings.prompt_tokens, timings.prompt_seconds = len(prompt), time.perf_counter() - start
        for number in range(max_new_tokens):
            token = choose_token(logits, sampling, generator)
            if token in stop_tokens:
                return
            yield token
            if number + 1 < max_new_tokens:
                start = time.perf_counter()
                logits = conversation.read([token])
                timings.tokens, timings.seconds = number + 1, timings.seconds + time.perf_counter() - start
    finally:
        conversation.close()


def _check_prompt(manifest: Manifest, signature: LanguageSignature, prompt: npt.ArrayLike) -> list[int]:
    """The prompt's tokens. Raises MisuseError if there are none, or some that the model does not know."""
    array = np.asarray(prompt)
    if not array.size:
        raise MisuseError("the prompt has no tokens")
    if array.ndim != 1 or array.dtype.kind not in "iu":
        shape = list(array.shape)
        raise MisuseError(
            f"a prompt is a list of the numbers of tokens, not an array of {array.dtype} with shape {shape}"
        )
    tokens: list[int] = array.tolist()
    role = next(tensor.role for tensor in manifest.inputs if tensor.name == signature.ids)
    if role is not None and role.rows and (unknown := [token for token in tokens if not 0 <= token < role.rows]):
        raise MisuseError(f"the prompt has the token {unknown[0]}, and the model has a vocabulary of {role.rows}")
    return tokens
