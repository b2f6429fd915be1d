"""What the runtime asks of an engine, whatever built it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt


class Engine(Protocol):
    """One compiled piece of a model, as a rank's program runs it."""

    @property
    def inputs(self) -> Sequence[str]:
        """Names of the values that it takes."""

    @property
    def optional(self) -> frozenset[str]:
        """Names of the values that it may be given: weights that these then replace."""

    @property
    def outputs(self) -> Sequence[str]:
        """Names of the values that it gives."""

    def run(self, values: Mapping[str, Any], into: Mapping[str, Any]) -> dict[str, Any]:
        """Run on values of the backend that loaded it, by name: all of `inputs`, any of `optional`. Returns `outputs`.

        An output in `into` is written to that value, which may be one of the inputs.
        Raises EngineError when the engine fails.
        """


class LoadedEngine(Engine, Protocol):
    """An engine on its device."""

    @property
    def capture_blocker(self) -> str | None:
        """Why its work can't be captured as a CUDA graph; None where it can, and where there are no CUDA graphs."""


class CollectiveEngine(ABC):
    """An engine with collectives inside: it exchanges values with other ranks' engines while it runs."""

    @abstractmethod
    def connect(self, communicator: Any) -> None:
        """Give the engine what it exchanges values by. All ranks of the group do so at the same time.

        Raises PackageError where the engine does not take it.
        """


class Backend(Protocol):
    """Loads engines on one device, and moves arrays to it and from it.

    Where it is `asynchronous`, engines have only been told to run when `run` returns. `notes` are what a user should
    know of how it works.
    """

    asynchronous: bool
    notes: list[str]

    def attach(self) -> None:
        """To be called first by the thread that uses the backend."""

    def detach(self) -> None:
        """To be called last by that thread."""

    def load(self, path: Path, source: Path | None = None, sizes_only: Collection[str] = ()) -> LoadedEngine:
        """Load the engine file at `path`, which was built from `source`. Raises PackageError when it can't be.

        Of the inputs `sizes_only` it reads nothing but the sizes.
        """

    def upload(self, array: npt.NDArray[Any]) -> Any:
        """The array as a value that the backend's engines take."""

    def zeros(self, shape: tuple[int, ...], dtype: str) -> Any:
        """Zeros as a value that the backend's engines take and may write to. `dtype` is numpy's name."""

    def download(self, values: Mapping[str, Any]) -> dict[str, npt.NDArray[np.generic]]:
        """Values of the backend's engines as arrays, by name; waits until they are made."""

    def fetch(self, values: Mapping[str, Any]) -> Callable[[], dict[str, npt.NDArray[np.generic]]]:
        """Begin to download; what is returned waits, on any thread, and gives the arrays."""

    def persist_state(self, value: Any, before: Any) -> Any:
        """A state where it may stay from request to request: `value`, or what was there `before`, with that in it."""

    def wait_all(self) -> None:
        """Wait until all that the device was given is done."""

    def used_bytes(self) -> int | None:
        """The bytes in use of a memory that is the device's own; None for the host's."""

    def reserve(self, size: int) -> None:
        """Expect to need so many bytes beside the engines'."""

    def stop(self) -> None:
        """Make the engines that are running fail at once; they can't be run again."""

    def accumulate(self, operation: str, total: Any, part: Any) -> None:
        """Bring `part` into `total`, in place, by `sum` or `max`; both are values of the backend's engines."""
