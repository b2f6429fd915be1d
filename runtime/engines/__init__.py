"""The interfaces of engines and of the backends that load them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from splitc.runtime.arrays.array import Allocate, Zeros
from splitc.runtime.gpu.weight_places import SwapBuffer
from splitc.runtime.hardware.memory_use import MemoryUse
from splitc.runtime.package.manifest import EngineFile, Weight


class Engine(Protocol):
    """One compiled file on its device, as a rank's program runs it."""

    @property
    def inputs(self) -> Sequence[str]:
        """Names of its inputs."""

    @property
    def optional(self) -> frozenset[str]:
        """Names of optional inputs: values that may replace weights."""

    @property
    def outputs(self) -> Sequence[str]:
        """Names of its outputs."""

    @property
    def capture_blocker(self) -> str | None:
        """Why its work can't be captured as a CUDA graph; None if it can, and on CPUs."""

    def run(self, values: Mapping[str, Any], into: Mapping[str, Any]) -> dict[str, Any]:
        """Run on values by name: all of `inputs`, any of `optional`. Returns all of `outputs`.

        Values are those of the backend that loaded the engine. An output in `into` is written to that value, which may
        be one of the inputs. Raises EngineError if the engine fails.
        """


class Communicator(Protocol):
    """A rank's end of the collectives inside engines.

    - `pointer`: NCCL's communicator; None on the host.
    - `capturable`: whether operators that use it can be captured as a CUDA graph.
    """

    capturable: bool

    @property
    def pointer(self) -> int | None: ...

    def registered(self) -> AbstractContextManager[Path]:
        """The library to register ONNX Runtime's operators from.

        Operators that this thread registers inside the context use this communicator. Raises PackageError if the
        library was not built.
        """

    def connect(self) -> None:
        """Wait until the ranks are connected, before engines run. Raises the error of any rank."""

    def begin(self, request: int) -> int:
        """Begin the request with this number, which is the same on all ranks and grows with each request.

        Returns the number of its run.
        """

    def check(self) -> None:
        """Raise EngineError if a collective failed on the device. To be called when a request has ended there."""

    def fail(self, run: int) -> bool:
        """Leave the run with this number. To be called as soon as this rank's part fails.

        Returns whether the other ranks' collectives of that run then fail at once. If not, they would block for ever.
        """


@dataclass(frozen=True)
class LoadOptions:
    """How to load an engine.

    - `entry`: what its package's manifest says of it.
    - `source`: the ONNX file that the engine was built from.
    - `communicator`: for an engine with collectives inside. All ranks of its group must load theirs at the same time.
    - `weights`: those in files beside the engine that several sessions may share.
    - `replays`: whether runs may be recorded as CUDA graphs.
    """

    entry: EngineFile = EngineFile("", [], [])
    source: Path | None = None
    communicator: Communicator | None = None
    weights: Sequence[Weight] | None = None
    replays: bool = True


class Backend(ABC):
    """Loads engines on one device, and copies arrays to it and from it.

    - `asynchronous`: `run` returns once the engine is launched, before it has finished.
    - `notes`: messages for the user.

    Methods that a device does not need do nothing.
    """

    asynchronous = False
    notes: list[str]

    def attach(self) -> None:
        """To be called by the thread that uses the backend: first, and again after code of the caller's ran on it."""

    def detach(self) -> None:
        """To be called last by the thread that uses the backend."""

    @abstractmethod
    def load(self, path: Path, options: LoadOptions = LoadOptions()) -> Engine:
        """Load the engine file at `path`. Raises PackageError if it can't be loaded."""

    @abstractmethod
    def upload(self, array: npt.NDArray[Any]) -> Any:
        """The array as a value for the backend's engines."""

    @abstractmethod
    def zeros(self, wanted: Mapping[str, Zeros]) -> dict[str, Any]:
        """Zeros as writable values for the backend's engines, by name.

        Raises EngineError if there is not enough memory.
        """

    @abstractmethod
    def copy_front(self, value: Any, longer: Any, axis: int) -> None:
        """Copy a value over the beginning of a longer one, along this axis."""

    @abstractmethod
    def download(self, values: Mapping[str, Any]) -> dict[str, npt.NDArray[np.generic]]:
        """Values of the backend's engines as arrays on the host, by name. Waits until they are computed."""

    @abstractmethod
    def fetch(
        self, values: Mapping[str, Any], allocate: Allocate | None = None
    ) -> Callable[[], dict[str, npt.NDArray[np.generic]]]:
        """Begin to download. Returns a function that waits, on any thread, and returns the arrays.

        With `allocate`, a GPU writes to the arrays that it returns.
        """

    @abstractmethod
    def persist_state(self, value: Any, before: Any) -> Any:
        """Where a state stays until the next request: `value` itself, or `before` with `value` copied into it."""

    def wait_all(self) -> None:
        """Wait until the device has finished all its work."""

    def memory(self) -> MemoryUse | None:
        """The memory in use on the device; None if it is that of a process with more than this rank."""
        return None

    def own_process(self, lent: Callable[[], int] = lambda: 0) -> None:
        """Take the process's memory for that of the device, if it has none of its own.

        `lent` returns the bytes of a request's feeds in shared memory, which count too.
        """

    def reserve(self, size: int) -> None:
        """Reserve this many bytes, besides the engines' own."""

    def limit(self, size: int | None) -> None:
        """Limit the bytes for weights and values of engines that are loaded from now on; None for no limit."""

    def loading(self) -> AbstractContextManager[None]:
        """The context to load a rank's engines in. On a CPU they share the limit; elsewhere each has its own."""
        return nullcontext()

    def map_weights(self) -> None:
        """Let CPU engines that are loaded from now on read their weights from mapped files, unpacked."""

    def swap_weights(self, buffer: SwapBuffer) -> None:
        """Keep weights of engines that are loaded from now on in this buffer, which other models use in turn."""

    def bring_in(self) -> None:
        """Copy swapped weights into their buffer unless they are there, and wait. Engines must not run before."""

    def begin_request(self) -> None:
        """To be called before a request's work."""

    def end_request(self) -> None:
        """To be called when a request's work was done, or launched."""

    @abstractmethod
    def stop(self) -> None:
        """Make running engines fail at once. They can't be run again."""
