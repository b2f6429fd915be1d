"""A prompt and the tokens after it, on a session."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from splitc.runtime.arrays.array import Array
from splitc.runtime.errors import EngineError, MisuseError
from splitc.runtime.generate.feeder import Feeder
from splitc.runtime.generate.signature import LanguageSignature, find_signature
from splitc.runtime.package.manifest import Manifest

Logits = npt.NDArray[Any]
# Tokens beyond the prompt for which caches have room at first, and by which they grow; a quarter of the prompt if that
# is more. A choice: with fewer, more requests copy the caches into larger ones; with more, caches take memory that is
# not used, and more than usual rotary tables have rows, which ONNX Runtime refuses.
AHEAD = 4096
# The least capacity of caches in a session that replays, in tokens. A choice: each capacity has CUDA graphs of its own,
# and smaller ones would save little memory.
LEAST_CAPACITY = 256


class StateHolder(Protocol):
    """A sequence's interface for generation: see StateSequence."""

    def run(self, feeds: Mapping[str, npt.ArrayLike]) -> dict[str, Array]:
        """Run the model on the feeds."""

    def hold(self, feeds: Mapping[str, npt.ArrayLike]) -> None:
        """Hold feeds on the ranks that are the same in all requests."""

    def load(self, states: Mapping[str, npt.ArrayLike]) -> None:
        """Begin with states."""

    def grow(self, capacity: int) -> None:
        """Make room for more tokens."""

    def close(self) -> None:
        """Free the states."""


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

    def start(self, capacity: int | None = None) -> StateHolder:
        """Open a sequence whose states stay on the ranks."""


class Conversation:
    """Reads tokens, and returns the logits after the last one, [vocabulary]. A model without states reads all again.

    The prompt has `prompt` tokens, and at most `most` are read in all. Caches that are written in place begin with a
    capacity beyond the prompt, and grow; if `most` is None, each request allocates new ones. If the session replays
    requests, capacities are rounded up: see `round_capacity`.
    """

    def __init__(self, session: ModelRunner, signature: LanguageSignature, prompt: int, most: int | None) -> None:
        self._session = session
        self._signature = signature
        self._most = most
        self._chunk = 1
        self._tokens: list[int] = []
        self._sequence: StateHolder | None = None
        self._feeder = Feeder(session.manifest, signature)
        self._choose_capacity(prompt)
        self._open(self._capacity)

    def _choose_capacity(self, tokens: int) -> None:
        """Choose a capacity with room beyond these tokens. The least one is the same, before rounding up."""
        self._least = self._capacity = None
        if self._most is not None and any(state.in_place for state in self._session.manifest.states):
            self._least = min(self._most, tokens + max(AHEAD, tokens // 4))
            self._capacity = round_capacity(self._least) if self._session.replays else self._least

    def _open(self, capacity: int | None) -> None:
        self._capacity = capacity
        if self._session.manifest.states:
            self._sequence = self._session.start(capacity)

    def read_prompt(self, prompt: Sequence[int], chunk: int, prefill: ModelRunner | None = None) -> Logits:
        """Read a prompt first, in chunks; or at once with another package, which computes the caches.

        Raises MisuseError if that lacks some.
        """
        if prefill is not None:
            return self._read_prompt_with(prefill, prompt)
        self._chunk = self._feeder.chunk(len(prompt), chunk)
        if self._sequence is None:
            return self.read(prompt)
        return self._or_with_least_capacity(partial(self._read_chunks, prompt), prompt)

    def _or_with_least_capacity(self, read: Callable[[], Logits], new: Sequence[int]) -> Logits:
        """Read new tokens. If an engine fails, read all tokens again with the least capacity.

        A model may have tables with a fixed number of rows that the manifest does not state.
        """
        tokens = [*self._tokens, *new]
        try:
            return read()
        except EngineError:
            if self._capacity == self._least:
                raise
        self.close()
        self._tokens = []
        self._open(self._least)
        return self._read_chunks(tokens)

    def _read_chunks(self, tokens: Sequence[int]) -> Logits:
        logits: Logits = np.empty(0)
        for first in range(0, len(tokens), self._chunk):
            logits = self._read(tokens[first : first + self._chunk])
        return logits

    def _read_prompt_with(self, prefill: ModelRunner, prompt: Sequence[int]) -> Logits:
        self._feeder.chunk(len(prompt), len(prompt))  # raises for a model that can't go on token by token
        manifest, signature, handed = self._session.manifest, find_signature(prefill.manifest), self._signature.handed
        outputs = prefill.run(Feeder(prefill.manifest, signature).feeds(prompt, len(prompt)))
        if missing := [state.output for state in manifest.states if state.output not in outputs]:
            raise MisuseError(
                f"the prefill package ({prefill.manifest.source.name}) does not make {missing[0]}, which "
                f"{manifest.source.name} wants to go on from"
            )
        if self._sequence is not None:
            self._sequence.hold({name: outputs[output] for name, output in handed.items()})
            self._sequence.load({state.input: outputs[state.output] for state in manifest.states})
        self._tokens.extend(prompt)
        logits: Logits = outputs[signature.logits][0, -1]
        return logits

    def read(self, new: Sequence[int]) -> Logits:
        """Read tokens after those before."""
        total = len(self._tokens) + len(new)
        if self._sequence is None or self._capacity is None or total <= self._capacity:
            return self._read(new)
        self._choose_capacity(total)
        self._sequence.grow(self._capacity)
        return self._or_with_least_capacity(partial(self._read, new), new)

    def _read(self, new: Sequence[int]) -> Logits:
        self._tokens.extend(new)
        run = self._session.run if self._sequence is None else self._sequence.run
        fed = self._tokens if self._sequence is None else new
        outputs: Mapping[str, Array] = run(self._feeder.feeds(fed, len(self._tokens)))
        logits: Logits = outputs[self._signature.logits][0, -1]
        return logits

    def close(self) -> None:
        """Free the caches."""
        if self._sequence is not None:
            self._sequence.close()


def round_capacity(tokens: int) -> int:
    """The capacity for this many tokens: at most a quarter more, and at least 256.

    There are few such sizes, so most conversations reuse the caches and CUDA graphs of an earlier one.
    """
    step = max(LEAST_CAPACITY, 1 << (tokens - 1).bit_length()) // 8
    return max(LEAST_CAPACITY, -(-tokens // step) * step)
