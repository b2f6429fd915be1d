"""A prompt and the tokens after it, on a session."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from splitc.runtime.arrays import Array
from splitc.runtime.errors import EngineError, MisuseError
from splitc.runtime.generate.feeder import Feeder
from splitc.runtime.generate.signature import LanguageSignature, find_signature
from splitc.runtime.manifest import Manifest
from splitc.runtime.sequence import StateSequence

Logits = npt.NDArray[Any]
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


class Conversation:
    """Reads tokens, and gives the logits after the last one, [vocabulary]. A model without states reads all again.

    `room` is for so many tokens, or None. If the session replays requests, there is more: see `round_room`.
    """

    def __init__(self, session: ModelRunner, signature: LanguageSignature, room: int | None) -> None:
        self._session = session
        self._signature = signature
        self._exact = room
        self._room = room if room is None or not session.replays else round_room(room)
        self._tokens: list[int] = []
        self._sequence: StateSequence | None = None
        self._open()

    def _open(self) -> None:
        self._feeder = Feeder(self._session.manifest, self._signature, self._room)
        if self._session.manifest.states:
            self._sequence = self._session.start(self._room)

    def read_prompt(self, prompt: Sequence[int], chunk: int) -> Logits:
        """Read a prompt first, in chunks."""
        size = self._feeder.chunk(len(prompt), chunk)
        if self._sequence is None:
            return self.read(prompt)
        try:
            return self._read_chunks(prompt, size)
        except EngineError:
            if self._room == self._exact:
                raise
        # A model may have tables for so many tokens and no more, of which the manifest knows nothing.
        self.close()
        self._room, self._tokens = self._exact, []
        self._open()
        return self._read_chunks(prompt, size)

    def _read_chunks(self, prompt: Sequence[int], size: int) -> Logits:
        logits: Logits = np.empty(0)
        for first in range(0, len(prompt), size):
            logits = self.read(prompt[first : first + size])
        return logits

    def read_prompt_with(self, prefill: ModelRunner, prompt: Sequence[int]) -> Logits:
        """Read a prompt with another package, which makes the caches. Raises MisuseError if it does not make all."""
        self._feeder.chunk(len(prompt), len(prompt))  # raises for a model that can't go on token by token
        manifest, signature = self._session.manifest, find_signature(prefill.manifest)
        outputs = prefill.run(Feeder(prefill.manifest, signature).feeds(prompt, len(prompt)))
        if missing := [state.output for state in manifest.states if state.output not in outputs]:
            raise MisuseError(
                f"the prefill package ({prefill.manifest.source.name}) does not make {missing[0]}, which "
                f"{manifest.source.name} wants to go on from"
            )
        if self._sequence is not None:
            self._sequence.load({state.input: outputs[state.output] for state in manifest.states})
        self._tokens.extend(prompt)
        logits: Logits = outputs[signature.logits][0, -1]
        return logits

    def read(self, new: Sequence[int]) -> Logits:
        """Read tokens after those before."""
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


def round_room(tokens: int) -> int:
    """The room for so many tokens, at most a quarter more and 256 at least.

    There are few such sizes, so most conversations have the caches, and the CUDA graphs, of an earlier one.
    """
    step = max(LEAST_ROOM, 1 << (tokens - 1).bit_length()) // 8
    return max(LEAST_ROOM, -(-tokens // step) * step)
