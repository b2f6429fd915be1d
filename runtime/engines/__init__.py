"""The interfaces of engines and of the backends that load them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from splitc.runtime.arrays.array import Allocate, Zeros
from splitc.runtime.gpu.weight_places import SwapBuffer
from splitc.runtime.package.manifest import Weight


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

    `pointer` is that of NCCL's communicator; None on the host. `capturable` says whether operators that use it can be
    captured as a CUDA graph.
    """

    capturable: bool

    @property
    def pointer(self) -> int | None: ...

    def registered(self) -> AbstractContextManager[Path]:
        """The library to register ONNX Runtime's operators from. Meanwhile, on this thread, they get this end.

        Raises PackageError if the library was not built.
        """

    def connect(self) -> None:
        """Wait until the ranks are connected, before engines run. Raises the error of any rank."""

    def begin(self, request: int) -> int:
        """Begin the request of this number, by which all ranks know it. Later ones have larger numbers.

        Returns the number of its run.
        """

    def check(self) -> None:
        """Raise EngineError if a collective went wrong on the device. To be called when a request has ended there."""

    def fail(self, run: int) -> bool:
        """Take no further part in the run of this number. To be called as soon as this rank's part fails.

        Returns whether the other ranks' collectives of that run then fail at once. If not, they would block for ever.
        """


@dataclass(frozen=True)
class LoadOptions:
    """How an engine is loaded, which was built from the file `source`.

    It reads only the sizes of the inputs `sizes_only`. Its `weights` lie in files beside it. If it is `tuned`, it has
    kernels that may be chosen by shape. Unless it `replays`, no run of it is recorded. An engine with collectives
    inside takes a `communicator`: all ranks of its group must load theirs at the same time.
    """

    source: Path | None = None
    sizes_only: Collection[str] = ()
    communicator: Communicator | None = None
    weights: Sequence[Weight] | None = None
    tuned: bool = True
    replays: bool = True


class Backend(ABC):
    """Loads engines on one device, and copies arrays to it and from it.

    If it is `asynchronous`, engines have only been launched when `run` returns. `uses_operators` says that collectives
    inside its engines are operators of splitc's own. `notes` are messages for the user. What a device has no need of
    does nothing here.
    """

    asynchronous = False
    uses_operators = False
    notes: list[str]

    def attach(self) -> None:
        """Must be called first by the thread that uses the backend."""

    def detach(self) -> None:
        """Must be called last by that thread."""

    @abstractmethod
    def load(self, path: Path, options: LoadOptions = LoadOptions()) -> Engine:
        """Load the engine file at `path`. Raises PackageError if it can't be loaded."""

    @abstractmethod
    def upload(self, array: npt.NDArray[Any]) -> Any:
        """The array as a value for the backend's engines."""

    @abstractmethod
    def zeros(self, wanted: Mapping[str, Zeros]) -> dict[str, Any]:
        """Zeros as values for the backend's engines, which may write to them, by name.

        Raises EngineError if there is not enough memory.
        """

    @abstractmethod
    def copy_front(self, value: Any, longer: Any, axis: int) -> None:
        """Copy a value over the beginning of one that is longer along this axis."""

    @abstractmethod
    def download(self, values: Mapping[str, Any]) -> dict[str, npt.NDArray[np.generic]]:
        """Values of the backend's engines as arrays on the host, by name. Waits until they are computed."""

    @abstractmethod
    def fetch(
        self, values: Mapping[str, Any], allocate: Allocate | None = None
    ) -> Callable[[], dict[str, npt.NDArray[np.generic]]]:
        """Begin to download. Returns a function that waits, on any thread, and gives the arrays.

        With `allocate`, a GPU writes to the arrays that it gives.
        """

    @abstractmethod
    def persist_state(self, value: Any, before: Any) -> Any:
        """Where a state stays until the next request: `value` itself, or `before` with `value` copied into it."""

    def wait_all(self) -> None:
        """Wait until the device has finished all its work."""

    def used_bytes(self) -> int | None:
        """The bytes in use of the device's own memory; None if it uses the host's."""
        return None

    def reserve(self, size: int) -> None:
        """Reserve this many bytes beside the engines' own."""

    def limit(self, size: int | None) -> None:
        """Limit the bytes that engines loaded from now on take for weights and values; None for no limit."""

    def loading(self) -> AbstractContextManager[None]:
        """While a rank's engines are loaded: on a CPU these have the limit together, and otherwise each for itself."""
        return nullcontext()

    def map_weights(self) -> None:
        """Let engines on a CPU that are loaded from now on take weights from their mapped files, as they are."""

    def swap_weights(self, buffer: SwapBuffer) -> None:
        """Let weights of engines that are loaded from now on have this buffer, in turn with those of other models."""

    def bring_in(self) -> None:
        """Bring these weights in, if they are not there, and wait for that. Before, engines must not run."""

    @abstractmethod
    def stop(self) -> None:
        """Make running engines fail at once. They can't be run again."""

    @abstractmethod
    def accumulate(self, operation: str, total: Any, part: Any) -> None:
        """Reduce `part` into `total`, in place, by `sum` or `max`. Both are values of the backend's engines."""
