"""All ranks of a session, loaded and ended together."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, wait
from functools import partial

from splitc.runtime.collectives.threads import Hub, connect
from splitc.runtime.engines import Backend
from splitc.runtime.errors import EngineError
from splitc.runtime.hardware.memory_use import RankMemory
from splitc.runtime.ranks.loaded import Setup
from splitc.runtime.ranks.request import InFlightRequest
from splitc.runtime.ranks.thread import Worker
from splitc.runtime.threads.failures import Failure, attempt
from splitc.runtime.threads.futures import first_error

# Seconds that ranks get to end if not all can start. A choice: an engine's load can't be interrupted, and takes
# seconds.
PATIENCE = 10.0


class Workers:
    """The ranks of a package as threads, on CPU devices or a single GPU.

    `broken` is called if a rank's thread fails. With `replays`, the single GPU's rank replays requests.
    """

    def __init__(
        self,
        setups: Sequence[Setup],
        backends: Sequence[Backend],
        broken: Callable[[BaseException], None],
        replays: bool,
    ) -> None:
        self._hub = Hub(len(backends))
        self._numbers = itertools.count()
        ends = zip(setups, backends, connect(self._hub, backends), strict=True)
        self._workers = [Worker(*end, broken, () if replays else None) for end in ends]

    def __len__(self) -> int:
        return len(self._workers)

    def start(self) -> None:
        """Start all ranks, which then load their engines. If one can't start, all are ended."""
        try:
            for worker in self._workers:
                worker.start()
        except BaseException as error:  # there may be too many threads
            self._workers = [worker for worker in self._workers if worker.is_alive()]
            self.abort(error)
            self.put(None)
            self.join(PATIENCE)
            raise

    def wait_loaded(self) -> None:
        """Wait until all ranks have loaded their engines. Raises the first error, PackageError for a bad package."""
        error = first_error((worker.ready for worker in self._workers), "loading ranks")
        if error is not None:
            raise error

    @property
    def notes(self) -> list[str]:
        """Messages of the backends for the user."""
        return [note for worker in self._workers for note in worker.notes]

    def device_memory(self) -> list[RankMemory]:
        """The memory of the ranks' GPUs since loading; empty for CPU devices."""
        return [memory for worker in self._workers if (memory := worker.device_memory()) is not None]

    def put(self, request: InFlightRequest | None) -> None:
        """Give all ranks a request. None ends them after all earlier requests."""
        if request is not None:
            request.number = next(self._numbers)
        for worker in self._workers:
            worker.requests.put(request)

    def bring_in(self) -> None:
        """Copy swapped weights in on all ranks, and wait, since a replay would not.

        A callback of a request on a rank's own thread does that rank's part itself. Raises the error of a rank that
        fails.
        """
        brought: list[Future[None]] = []
        for worker in self._workers:
            brought.append(Future())
            work = partial(_complete, brought[-1], worker.bring_in)
            if worker is threading.current_thread():
                work()
            else:
                worker.requests.put(work)
        while wait(brought, 1.0).not_done:
            if not all(worker.is_alive() for worker in self._workers):
                raise EngineError("a rank has ended")
        if (error := first_error(brought)) is not None:
            raise error

    def watch(self, future: Future[InFlightRequest] | None, request: InFlightRequest) -> None:
        """Do nothing: threads finish requests themselves."""

    def forget(self, sequence: int, reusable: bool) -> None:
        """Free the states of a sequence, or keep them for another one if `reusable`."""
        for worker in self._workers:
            worker.requests.put(partial(worker.forget, sequence, reusable))

    def abort(self, error: BaseException) -> None:
        """End all waits between ranks with this error."""
        self._hub.abort(error)

    def stop(self) -> None:
        """Make running engines fail at once."""
        for worker in self._workers:
            worker.backend.stop()

    def join(self, patience: float) -> bool:
        """Wait for the ranks to end, for at most `patience` seconds. Returns whether they have ended."""
        deadline = time.monotonic() + patience
        others = [worker for worker in self._workers if worker is not threading.current_thread()]
        for worker in others:  # a rank may have had the last reference to the session
            worker.join(max(0.0, deadline - time.monotonic()))
        return not any(worker.is_alive() for worker in others)

    def clear(self) -> None:
        """Release the ranks after they have ended."""
        self._workers = []


def _complete(future: Future[None], work: Callable[[], None]) -> None:
    """Do the work, and set the future's result or error."""
    done = attempt(work)
    if isinstance(done, Failure):
        future.set_exception(done.error)
    else:
        future.set_result(None)
