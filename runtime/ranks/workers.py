"""All ranks of a session: loaded together, and ended together."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_EXCEPTION, wait
from pathlib import Path

from splitc.runtime.collectives.connect import connect_devices
from splitc.runtime.devices import Device
from splitc.runtime.engines import Backend
from splitc.runtime.manifest import Manifest, State
from splitc.runtime.memory_use import RankMemory
from splitc.runtime.ranks.request import InFlightRequest
from splitc.runtime.ranks.thread import Worker

# Seconds that ranks get to end, when one of them could not be loaded.
PATIENCE = 10.0


class Workers:
    """The ranks of a package, each on its device, with their engines loaded. `states` are those that stay on them.

    `broken` is called when a rank's thread fails. Raises PackageError for what a rank can't load.
    """

    def __init__(
        self,
        package: Path,
        manifest: Manifest,
        states: Sequence[State],
        devices: Sequence[Device],
        backends: Sequence[Backend],
        broken: Callable[[BaseException], None],
    ) -> None:
        self._collectives = connect_devices(devices, backends)
        ends = zip(manifest.ranks, backends, self._collectives, strict=True)
        self._workers = [
            Worker(number, rank, states, package, backend, collectives, broken)
            for number, (rank, backend, collectives) in enumerate(ends)
        ]
        for worker in self._workers:
            worker.start()
        self._wait_loaded()

    def __len__(self) -> int:
        return len(self._workers)

    def __getitem__(self, number: int) -> Worker:
        return self._workers[number]

    def __iter__(self) -> Iterator[Worker]:
        return iter(self._workers)

    def _wait_loaded(self) -> None:
        """Wait until each rank has its engines. Raises the first error; the other ranks are then ended."""
        done, _ = wait([worker.ready for worker in self._workers], return_when=FIRST_EXCEPTION)
        failed = [error for future in done if (error := future.exception()) is not None]
        if failed:
            self.abort(failed[0])
            self.put(None)
            if not self.join(PATIENCE):
                self.stop()
            raise failed[0]

    @property
    def capturable(self) -> bool:
        """Whether what the ranks exchange can be captured as a CUDA graph."""
        return all(each.capturable for each in self._collectives)

    @property
    def by_host(self) -> list[tuple[int, int]]:
        """Pairs of GPUs that exchange values through the host, since copies between them come out wrong here."""
        return sorted({pair for each in self._collectives for pair in each.by_host})

    @property
    def notes(self) -> list[str]:
        """What a user should know of how the devices work."""
        return [note for worker in self._workers for note in worker.backend.notes]

    def device_memory(self) -> list[RankMemory]:
        """What the ranks' GPUs hold since they were loaded; nothing for CPU devices."""
        return [memory for worker in self._workers if (memory := worker.device_memory()) is not None]

    def put(self, request: InFlightRequest | None) -> None:
        """Give all ranks a request; None ends them after all that they were given."""
        for worker in self._workers:
            worker.requests.put(request)

    def abort(self, error: BaseException) -> None:
        """Let no rank wait for another one any more."""
        self._collectives[0].abort(error)

    def stop(self) -> None:
        """Make the engines that are running fail at once."""
        for worker in self._workers:
            worker.backend.stop()

    def join(self, patience: float) -> bool:
        """Wait for the ranks to end, for so many seconds at most. Returns whether they have."""
        deadline = time.monotonic() + patience
        for worker in self._workers:
            worker.join(max(0.0, deadline - time.monotonic()))
        return not any(worker.is_alive() for worker in self._workers)

    def clear(self) -> None:
        """Forget the ranks, which have ended."""
        self._workers = []
