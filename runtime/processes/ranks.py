"""The ranks of a session in the processes of their devices, which may have ranks of other sessions too.

The session's process has no CUDA context. A rank that dies, hangs or can't go on ends the session with an error that
names it; the other ranks' processes are ended too, since they may wait for it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from functools import partial

from splitc.runtime.errors import EngineError, PackageError
from splitc.runtime.gpu.weight_places import SwapBuffer
from splitc.runtime.hardware.devices import Device
from splitc.runtime.ipc.mapped_files import remove_files
from splitc.runtime.processes.device_processes import DeviceProcesses, kill
from splitc.runtime.processes.launch import launch
from splitc.runtime.processes.reader import Reader
from splitc.runtime.processes.remote import FIRST_PATIENCE, PATIENCE, RemoteRanks
from splitc.runtime.processes.wire import SocketWire
from splitc.runtime.ranks.deployment import Deployment


class RankProcesses(RemoteRanks):
    """The ranks of a package in `processes`, once they are started.

    `processes` are shared with other sessions' ranks; if None, these ranks get their own. For `swap` see Setup.
    """

    _wire: SocketWire

    def __init__(
        self,
        deployment: Deployment,
        in_flight: int,
        broken: Callable[[BaseException], None],
        processes: DeviceProcesses | None,
        swap: Mapping[Device, SwapBuffer],
    ) -> None:
        super().__init__(deployment, broken)
        self._in_flight = in_flight
        # Whether there will be no ranks of others in them.
        self._alone = processes is None
        self._shared = processes or DeviceProcesses()
        self._launch = partial(launch, deployment, self._shared, swap)

    def start(self) -> None:
        """See RemoteRanks. Raises as `launch` does."""
        made = self._launch()
        self._channels, self._processes = made.channels, made.processes
        self._wire = SocketWire(self._channels, self._in_flight)
        try:
            self._reader = Reader(self._wire, self._receive, self._is_waiting, made.spins)
        except BaseException:  # there may be too many threads
            self.stop()
            self._wire.close()
            raise
        if self._alone:
            self._shared.seal()

    def _silent(self, rank: int) -> tuple[float, float]:
        beat, lived = self._processes[rank].last_beat
        return time.monotonic() - beat, PATIENCE if lived else FIRST_PATIENCE

    def _lost(self, rank: int) -> None:
        process = self._processes[rank]
        process.leave(self._channels[rank])
        if self._stopped or (self._closing and rank in self._ended):
            return
        error = self._why_it_ended(rank) if rank in self._ended else None
        error = error or EngineError(f"the process of {self._name(rank)} {process.how_it_ended()}")
        if not self._loaded[rank].done():
            self._loaded[rank].set_exception(PackageError(str(error)))
        self._break(error)

    def _why_it_ended(self, rank: int) -> BaseException:
        """Why a rank has ended before the session, while its process goes on."""
        loaded = self._loaded[rank]
        if loaded.done() and (error := loaded.exception()) is not None:
            return error
        return self._suspect[2] if self._suspect is not None else EngineError(f"{self._name(rank)} has ended")

    def stop(self) -> None:
        self._stopped = True
        kill(self._processes, self._why, self._files)

    def join(self, patience: float) -> bool:
        deadline = time.monotonic() + patience
        if not self._reader.join(patience):
            return False
        return all(process.join(max(0.0, deadline - time.monotonic())) for process in self._processes)

    def clear(self) -> None:
        self._reader.join()
        self._wire.close()
        remove_files(self._files)
