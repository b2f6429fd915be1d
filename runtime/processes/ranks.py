"""The ranks of a session as processes that it starts.

The session's process has no CUDA context. A rank that dies, hangs or can't go on ends the session with an error that
names it; the other ranks' processes are ended too, since they may wait for it.
"""

from __future__ import annotations

import signal
import subprocess
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from splitc.runtime.devices import Device
from splitc.runtime.errors import EngineError, PackageError
from splitc.runtime.manifest import Manifest, State
from splitc.runtime.mapped_files import remove_files
from splitc.runtime.processes.launch import launch
from splitc.runtime.processes.messages import Loaded
from splitc.runtime.processes.nccl_files import find_nccl_files
from splitc.runtime.processes.reader import Reader
from splitc.runtime.processes.remote import FIRST_PATIENCE, PATIENCE, RemoteRanks
from splitc.runtime.processes.wire import SocketWire


class RankProcesses(RemoteRanks):
    """The ranks of a package, each a process that has loaded its engines. `states` are those that stay on the ranks.

    Raises PackageError if a rank can't load its engines.
    """

    def __init__(
        self,
        package: Path,
        manifest: Manifest,
        states: Sequence[State],
        devices: Sequence[Device],
        threads: int,
        cuda_graphs: bool,
        in_flight: int,
        broken: Callable[[BaseException], None],
    ) -> None:
        super().__init__(manifest, devices, broken)
        self._files: set[str] = set()
        self._began = time.monotonic()
        made = launch(package, manifest, devices, states, threads, cuda_graphs, in_flight)
        self._pulse, self._channels, self._processes = made.pulse, made.channels, made.processes
        self._wire = SocketWire(self._channels, in_flight)
        self._reader = Reader(self._wire, self, made.spins)
        self._wait_loaded()

    def _rank_loaded(self, rank: int, message: Loaded) -> None:
        self._files.update(message.files)
        super()._rank_loaded(rank, message)

    def _silent(self, rank: int, now: float) -> tuple[float, float]:
        return now - (self._pulse[rank] or self._began), PATIENCE if self._pulse[rank] else FIRST_PATIENCE

    def lost(self, rank: int) -> None:
        code = self._processes[rank].wait()
        if self._stopped or (self._closing and code == 0):
            return
        how = f"was ended by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
        error = EngineError(f"the process of {self._name(rank)} {how}")
        if not self._loaded[rank].done():
            self._loaded[rank].set_exception(PackageError(str(error)))
        self._break(error)

    def stop(self) -> None:
        self._stopped = True
        running = [process for process in self._processes if process.poll() is None]
        for process in running:
            self._files |= find_nccl_files(process.pid)
        for process in running:
            process.kill()
        for process in running:
            process.wait()
        remove_files(self._files)

    def join(self, patience: float) -> bool:
        deadline = time.monotonic() + patience
        for process in self._processes:
            try:
                process.wait(max(0.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                return False
        return True

    def clear(self) -> None:
        self._reader.join()
        for channel in self._channels:
            channel.close()
        remove_files(self._files)
