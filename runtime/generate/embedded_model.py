"""A decoder of embeddings, wrapped as one of tokens: another model computes the embeddings, also for images."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from splitc.runtime.arrays.array import Array
from splitc.runtime.errors import MisuseError
from splitc.runtime.generate.conversation import ModelRunner, StateHolder
from splitc.runtime.generate.image_prompt import Positions
from splitc.runtime.package.manifest import Tensor


@dataclass(frozen=True)
class Embedding:
    """The model of embeddings: its tokens' input, its output, and the input for an image's features if it has one.

    Each `image_token` stands for the next row of the `features`, [rows, width].
    """

    session: ModelRunner
    ids: Tensor
    output: str
    slot: Tensor | None
    image_token: int
    features: Array

    def rows(self, ids: Array, used: int) -> tuple[Array, int]:
        """The embeddings of tokens, [batch, tokens, width], and how many rows of the features are used with them."""
        places = np.argwhere(ids == self.image_token)[: len(self.features) - used]
        part = self.features[used : used + len(places)]
        feeds = {self.ids.name: ids.astype(self.ids.dtype)}
        if self.slot is not None:
            feeds[self.slot.name] = part if len(self.slot.shape or ()) == part.ndim else part[None]
            return self.session.run(feeds)[self.output], used + len(places)
        made = self.session.run(feeds)[self.output]
        if len(places):
            made = made.copy()
            made[tuple(places.T)] = part
        return made, used + len(places)


class EmbeddedModel:
    """The decoder, with tokens as inputs. `embeds` is its input of embeddings. For the methods see ModelRunner.

    With `places`, its input `positions` has several numbers for each token; the caller feeds one.
    """

    def __init__(
        self,
        decoder: ModelRunner,
        embeds: str,
        embedding: Embedding,
        positions: str = "",
        places: Positions | None = None,
    ) -> None:
        self._decoder, self._embeds, self._embedding = decoder, embeds, embedding
        self._positions, self._places = positions, places
        inputs = {tensor.name: tensor for tensor in decoder.manifest.inputs}
        taken = inputs.pop(embeds)
        most = None if taken.max_shape is None else taken.max_shape[:2]
        shape = None if taken.shape is None else taken.shape[:2]
        ids = msgspec.structs.replace(embedding.ids, shape=shape, sample_shape=None, min_shape=None, max_shape=most)
        if places is not None:
            inputs[positions] = _without_rows(inputs[positions])
        self.manifest = msgspec.structs.replace(decoder.manifest, inputs=[ids, *inputs.values()])

    @property
    def replays(self) -> bool:
        return self._decoder.replays

    def run(self, feeds: Mapping[str, npt.ArrayLike]) -> dict[str, Array]:
        embedded, _ = self.embedded(feeds, 0)
        return self._decoder.run(embedded)

    def start(self, capacity: int | None = None) -> EmbeddedSequence:
        return EmbeddedSequence(self, self._decoder.start(capacity))

    def embedded(self, feeds: Mapping[str, npt.ArrayLike], used: int) -> tuple[dict[str, Any], int]:
        """The feeds with embeddings instead of tokens, and the number of feature rows in them."""
        rest = dict(feeds)
        rows, used = self._embedding.rows(np.asarray(rest.pop(self._embedding.ids.name)), used)
        if self._places is not None:
            places = np.asarray(rest[self._positions])
            rest[self._positions] = self._places.at(places).astype(places.dtype)
        return {**rest, self._embeds: rows}, used


class EmbeddedSequence:
    """A sequence of the decoder that takes tokens: see StateHolder. Images' rows are used in the order of requests."""

    def __init__(self, model: EmbeddedModel, sequence: StateHolder) -> None:
        self._model, self._sequence, self._used = model, sequence, 0

    def run(self, feeds: Mapping[str, npt.ArrayLike]) -> dict[str, Array]:
        embedded, self._used = self._model.embedded(feeds, self._used)
        return self._sequence.run(embedded)

    def hold(self, feeds: Mapping[str, npt.ArrayLike]) -> None:
        self._sequence.hold(feeds)

    def load(self, states: Mapping[str, npt.ArrayLike]) -> None:
        self._sequence.load(states)

    def grow(self, capacity: int) -> None:
        self._sequence.grow(capacity)

    def close(self) -> None:
        self._sequence.close()


def _without_rows(positions: Tensor) -> Tensor:
    """The input of positions for callers with one number for each token: [batch, tokens]."""
    shapes = (positions.shape, positions.max_shape)
    shape, most = (None if sizes is None else sizes[1:] for sizes in shapes)
    return msgspec.structs.replace(positions, shape=shape, sample_shape=None, min_shape=None, max_shape=most)


def check_rows(features: Array, tokens: int) -> None:
    """Raise MisuseError unless there is one row of features for each token that stands for one."""
    if len(features) != tokens:
        raise MisuseError(
            f"the vision model makes {len(features)} rows of features, and the processor's prompt has {tokens} tokens "
            "for them: the two are not of one model"
        )
