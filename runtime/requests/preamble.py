"""What is computed before the ranks: masks, positions and lengths, of what grows with each token."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np

from splitc.runtime.arrays.array import Array
from splitc.runtime.engines.onnxruntime_cpu import ERRORS, failed, open_session
from splitc.runtime.feeds.on_gpu import Feed, on_host
from splitc.runtime.package.states import Preamble


class PreambleEngine:
    """A package's preamble, on a thread of the caller's. Raises PackageError if ONNX Runtime can't load it."""

    def __init__(self, package: Path, preamble: Preamble) -> None:
        self._preamble = preamble
        self._session = open_session(package / preamble.file, 1)

    def apply(self, feeds: Mapping[str, Feed]) -> dict[str, Feed]:
        """The feeds with what the preamble makes of them, and without those that it alone reads.

        Raises EngineError if it fails on them.
        """
        own = {name: np.ascontiguousarray(on_host(feeds[name])) for name in self._preamble.inputs}
        try:
            made: list[Array] = self._session.run(self._preamble.outputs, own)
        except ERRORS as error:
            raise failed(self._preamble.file, str(error)) from error
        kept = {name: feed for name, feed in feeds.items() if name not in self._preamble.consumed}
        return {**kept, **dict(zip(self._preamble.outputs, made, strict=True))}
