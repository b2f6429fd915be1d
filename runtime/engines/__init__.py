"""What the runtime asks of an engine, whatever built it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt


class Engine(Protocol):
    """One compiled piece of a model, loaded on its device."""

    @property
    def inputs(self) -> Sequence[str]:
        """Names of the values that it takes."""

    @property
    def outputs(self) -> Sequence[str]:
        """Names of the values that it gives."""

    def run(self, values: Mapping[str, Any], into: Mapping[str, Any]) -> dict[str, Any]:
        """Run on values of the backend that loaded it, named as in `inputs`; returns those named in `outputs`.

        An output in `into` is written to that value, which may be one of the inputs.
        Raises EngineError when the engine fails.
        """


class Backend(Protocol):
    """Loads engines on one device, and moves arrays to it and from it."""

    def load(self, path: Path) -> Engine:
        """Load the engine file at `path`. Raises PackageError when it can't be."""

    def upload(self, array: npt.NDArray[Any]) -> Any:
        """The array as a value that the backend's engines take."""

    def download(self, value: Any) -> npt.NDArray[np.generic]:
        """A value of the backend's engines as an array."""

    def stop(self) -> None:
        """Make the engines that are running fail at once; they can't be run again."""

    def accumulate(self, operation: str, total: Any, part: Any) -> None:
        """Bring `part` into `total`, in place, by `sum` or `max`; both are values of the backend's engines."""
