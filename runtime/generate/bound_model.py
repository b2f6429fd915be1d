"""A model with some inputs bound, which its caller need not feed."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec
import numpy.typing as npt

from splitc.runtime.arrays.array import Array
from splitc.runtime.generate.conversation import ModelRunner, StateHolder


class BoundModel:
    """A model without the inputs `feeds`, which are added to each request, and held on the ranks by a sequence."""

    def __init__(self, session: ModelRunner, feeds: Mapping[str, npt.ArrayLike]) -> None:
        self._session = session
        self._feeds = feeds
        open_inputs = [tensor for tensor in session.manifest.inputs if tensor.name not in feeds]
        self.manifest = msgspec.structs.replace(session.manifest, inputs=open_inputs)

    @property
    def replays(self) -> bool:
        """See ModelRunner."""
        return self._session.replays

    def run(self, feeds: Mapping[str, npt.ArrayLike]) -> dict[str, Array]:
        """See ModelRunner."""
        return self._session.run({**feeds, **self._feeds})

    def start(self, capacity: int | None = None) -> StateHolder:
        """See ModelRunner. Bound inputs stay on the ranks."""
        sequence = self._session.start(capacity)
        sequence.hold(self._feeds)
        return sequence
