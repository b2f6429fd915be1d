"""Generate tokens with a package of a language model."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from splitc.runtime.arrays import Array
from splitc.runtime.errors import EngineError, MisuseError
from splitc.runtime.generate.sampling import Sampling, choose_token
from splitc.runtime.manifest import Manifest, Tensor
from splitc.runtime.sequence import StateSequence
from splitc.runtime.units import format_shape

# Default number of tokens of a prompt in one run.
PROMPT_CHUNK = 512
# The least room of a conversation that is replayed, in tokens.
LEAST_ROOM = 256


class ModelRunner(Protocol):
    """The session's interface for generation."""

    @property
    def manifest(self) -> Manifest:
        """The package's manifest."""

    @property
    def replays(self) -> bool:
        """Whether requests of previously seen shapes are replayed as CUDA graphs."""

    def run(self, feeds: Mapping[str, npt.ArrayLike]) -> dict[str, Array]:
        """Run the model once."""

    def start(self, capacity: int | None = None) -> StateSequence:
        """Open a sequence whose states stay on the ranks."""


@dataclass(frozen=True)
class LanguageSignature:
    """The names of a language model's inputs and of its logits. Some models have no mask or positions."""

    ids: str
    mask: str | None
    positions: str | None
    logits: str


@dataclass
class Timings:
    """Numbers of tokens and seconds, of the prompt and of the generated tokens after the first."""

    prompt_tokens: int = 0
    prompt_seconds: float = 0.0
    tokens: int = 0
    seconds: float = 0.0


def find_signature(manifest: Manifest) -> LanguageSignature:
    """Find the inputs of a language model and its logits, by their roles: token ids are the indices.

    Raises MisuseError for a model with other inputs.
    """
    states = {state.input for state in manifest.states}
    given = {state.output for state in manifest.states}
    inputs = [tensor for tensor in manifest.inputs if tensor.name not in states]
    masks, positions, ids = (_of_role(inputs, role) for role in ("mask", "positions", "indices"))
    rest = [tensor for tensor in inputs if tensor not in (*masks, *positions)]
    ids = ids or [tensor for tensor in rest if "ids" in tensor.name.lower()]
    if len(ids) != 1 or len(rest) > 1 or len(masks) > 1 or len(positions) > 1 or not _may_have(ids[0], 2):
        raise MisuseError(
            f"can't generate with {manifest.source.name}: it takes {', '.join(tensor.name for tensor in inputs)}, and "
            "splitc knows token ids, an attention mask and position ids (and states)"
        )
    outputs = [tensor for tensor in manifest.outputs if tensor.name not in given and _may_have(tensor, 3)]
    named = [tensor for tensor in outputs if "logits" in tensor.name.lower()] or outputs
    if not named:
        raise MisuseError(f"can't generate with {manifest.source.name}: it has no output of logits")
    return LanguageSignature(ids[0].name, _one(masks), _one(positions), named[0].name)


def _of_role(inputs: Sequence[Tensor], role: str) -> list[Tensor]:
    return [tensor for tensor in inputs if tensor.role is not None and tensor.role.kind == role]


def _may_have(tensor: Tensor, dimensions: int) -> bool:
    return tensor.shape is None or len(tensor.shape) == dimensions


def _one(tensors: Sequence[Tensor]) -> str | None:
    return tensors[0].name if tensors else None


def generate(
    session: ModelRunner,
    prompt: Sequence[int],
    *,
    max_new_tokens: int = 100,
    sampling: Sampling = Sampling(),
    stop_tokens: Collection[int] = (),
    prompt_chunk: int = PROMPT_CHUNK,
    prefill: ModelRunner | None = None,
    timings: Timings | None = None,
) -> Iterator[int]:
    """Generate tokens after the prompt, one by one, up to a stop token, which is not given.

    The caches stay on the ranks. A long prompt is run in chunks, or by the package `prefill`: a model that makes caches
    but takes none, which exporters write beside the decoder. A model without states gets all tokens again for each new
    one. `timings` is filled meanwhile. Raises MisuseError for an empty prompt, and for a model that is no language
    model.
    """
    signature = find_signature(session.manifest)
    if not len(prompt):
        raise MisuseError("the prompt has no tokens")
    role = next(tensor.role for tensor in session.manifest.inputs if tensor.name == signature.ids)
    if role is not None and role.rows and (unknown := [token for token in prompt if not 0 <= token < role.rows]):
        raise MisuseError(f"the prompt has the token {unknown[0]}, and the model has a vocabulary of {role.rows}")
    timings = timings if timings is not None else Timings()
    exact = None if prefill is not None else len(prompt) + max_new_tokens
    room = exact if exact is None or not session.replays else round_room(exact)
    generator = np.random.default_rng(sampling.seed)
    stateful = bool(session.manifest.states)
    tokens = list(prompt)
    feeder = Feeder(session.manifest, signature, room)
    chunk = feeder.chunk(len(prompt), prompt_chunk if stateful else len(prompt))
    start = time.perf_counter()
    sequence = session.start(room) if stateful else None
    run = sequence.run if sequence is not None else session.run
    try:
        if prefill is not None and sequence is not None:
            logits = _prefill(prefill, sequence, session.manifest, tokens)
        else:
            try:
                logits = _read_prompt(run, feeder, tokens, chunk)
            except EngineError:
                if room == exact or sequence is None:
                    raise
                # A model may have tables for so many tokens and no more, of which the manifest knows nothing.
                sequence.close()
                feeder, sequence = Feeder(session.manifest, signature, exact), session.start(exact)
                run = sequence.run
                logits = _read_prompt(run, feeder, tokens, chunk)
        timings.prompt_tokens, timings.prompt_seconds = len(tokens), time.perf_counter() - start
        for number in range(max_new_tokens):
            token = choose_token(logits, sampling, generator)
            if token in stop_tokens:
                return
            yield token
            tokens.append(token)
            if number + 1 < max_new_tokens:
                start = time.perf_counter()
                new = tokens[-1:] if stateful else tokens
                logits = run(feeder.feeds(new, len(tokens)))[signature.logits][0, -1]
                timings.tokens, timings.seconds = number + 1, timings.seconds + time.perf_counter() - start
    finally:
        if sequence is not None:
            sequence.close()


def round_room(tokens: int) -> int:
    """The room for so many tokens, at most a quarter more and 256 at least.

    There are few such sizes, so most conversations have the caches, and the CUDA graphs, of an earlier one.
    """
    step = max(LEAST_ROOM, 1 << (tokens - 1).bit_length()) // 8
    return max(LEAST_ROOM, -(-tokens // step) * step)


def _read_prompt(
    run: Callable[..., dict[str, Array]], feeder: Feeder, tokens: Sequence[int], chunk: int
) -> npt.NDArray[Any]:
    """Run the prompt in chunks. Returns the logits after its last token."""
    logits: Array = np.empty(0)
    for first in range(0, len(tokens), chunk):
        new = tokens[first : first + chunk]
        logits = run(feeder.feeds(new, first + len(new)))[feeder.signature.logits][0, -1]
    return logits


def _prefill(
    prefill: ModelRunner, sequence: StateSequence, manifest: Manifest, tokens: Sequence[int]
) -> npt.NDArray[Any]:
    """Run the prompt with another package, and load its caches into the sequence. Returns the last logits."""
    signature = find_signature(prefill.manifest)
    outputs = prefill.run(Feeder(prefill.manifest, signature).feeds(tokens, len(tokens)))
    if missing := [state.output for state in manifest.states if state.output not in outputs]:
        raise MisuseError(
            f"the prefill package ({prefill.manifest.source.name}) does not make {missing[0]}, which "
            f"{manifest.source.name} wants to go on from"
        )
    sequence.load({state.input: outputs[state.output] for state in manifest.states})
    logits: Array = outputs[signature.logits][0, -1]
    return logits


class Feeder:
    """Makes the feeds of one step, in the number types of the model's inputs."""

    def __init__(self, manifest: Manifest, signature: LanguageSignature, room: int | None = None) -> None:
        self.signature = signature
        self._inputs = {tensor.name: tensor for tensor in manifest.inputs}
        # If caches are written in place, they have room for all tokens from the beginning, and so has the mask. Then no
        # size changes from token to token, and requests can be replayed.
        self._room = room if manifest.states and all(state.in_place for state in manifest.states) else None

    def chunk(self, prompt: int, wanted: int) -> int:
        """The number of tokens in one run of the prompt. Raises MisuseError if the model has a fixed length above 1."""
        shape = self._inputs[self.signature.ids].shape
        fixed = None if shape is None else shape[1]
        if isinstance(fixed, int) and fixed != 1:
            raise MisuseError(f"can't generate with a model that takes {fixed} tokens at a time, no more and no less")
        return 1 if fixed == 1 else max(1, min(wanted, prompt))

    def feeds(self, new: Sequence[int], total: int) -> dict[str, Array]:
        """The feeds for `new` tokens, which are the last ones of `total`."""
        made = {self.signature.ids: np.array([new])}
        if self.signature.mask is not None:
            made[self.signature.mask] = self._mask(self._inputs[self.signature.mask], len(new), total)
        if self.signature.positions is not None:
            made[self.signature.positions] = np.arange(total - len(new), total)[None]
        return {name: array.astype(self._inputs[name].dtype) for name, array in made.items()}

    def _mask(self, tensor: Tensor, new: int, total: int) -> Array:
        """Ones for the tokens so far, and zeros for the room behind them.

        Raises MisuseError for a mask that is not one number per token, and for a sequence that exceeds its room.
        """
        if not _may_have(tensor, 2):
            raise MisuseError(f"can't generate with a mask of {format_shape(tensor.shape)} ('{tensor.name}')")
        length = None if tensor.shape is None else tensor.shape[1]
        ids = self._inputs[self.signature.ids]
        if tensor.shape == ids.shape and length is not None:
            return np.ones((1, new))
        room = length if isinstance(length, int) else self._room or total
        if total > room:
            raise MisuseError(f"the model has room for {room} tokens, and the sequence comes to {total}")
        return (np.arange(room) < total)[None]
