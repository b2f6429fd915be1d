"""The ranks of a session as the processes that MPI has started. Process 0 has the session, and is rank 0 too."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Sequence
from pathlib import Path

from splitc.runtime.devices import Device
from splitc.runtime.errors import EngineError, MisuseError
from splitc.runtime.manifest import Manifest, State
from splitc.runtime.manifest_file import FILE_NAME
from splitc.runtime.mpi.joining import Join, Left
from splitc.runtime.mpi.mpi_rank import run_rank
from splitc.runtime.mpi.mpi_wire import MpiWire, OwnControl
from splitc.runtime.mpi.world import World
from splitc.runtime.package_files import hash_file
from splitc.runtime.processes.launch import SPIN, has_spare_cores
from splitc.runtime.processes.reader import Reader
from splitc.runtime.processes.remote import PATIENCE, RemoteRanks
from splitc.runtime.version import VERSION

# Numbers of sessions.
_NUMBERS = itertools.count()


class MpiRanks(RemoteRanks):
    """The ranks of a package, each a process of MPI's. `states` are those that stay on the ranks.

    Raises PackageError if a rank can't load its engines, MisuseError if there are more or fewer processes than ranks.
    """

    def __init__(
        self,
        world: World,
        package: Path,
        manifest: Manifest,
        states: Sequence[State],
        devices: Sequence[Device],
        threads: int | None,
        verify: str,
        cuda_graphs: bool,
        broken: Callable[[BaseException], None],
    ) -> None:
        super().__init__(manifest, devices, broken)
        if world.size != len(devices):
            raise MisuseError(
                f"the package has {len(devices)} ranks, and MPI started {world.size} processes: use mpirun -n "
                f"{len(devices)}"
            )
        if world.broken.is_set():
            raise EngineError("an earlier session of this program broke, so its ranks can't be used again: start anew")
        self._world = world
        spins = has_spare_cores(devices)
        join = Join(
            number=next(_NUMBERS),
            package=package,
            seal=hash_file(package / FILE_NAME),
            version=VERSION,
            devices=tuple(devices),
            states=tuple(states),
            threads=threads,
            verify=verify,
            cuda_graphs=cuda_graphs,
            spin=SPIN if spins else 0.0,
        )
        for rank in range(1, world.size):
            world.control.send(rank, (join, None))
        own = OwnControl()
        threading.Thread(target=self._run_own, args=(join, own), name="splitc rank 0", daemon=True).start()
        self._wire = MpiWire(world.control, world.size, own)
        self._reader = Reader(self._wire, self, spins)
        self._wait_loaded()

    def _run_own(self, join: Join, own: OwnControl) -> None:
        try:
            run_rank(self._world, join, own)
        finally:
            own.send(Left())

    def _silent(self, rank: int, now: float) -> tuple[float, float]:
        return (self._world.life.silent(rank) if rank else 0.0), PATIENCE

    def _name(self, rank: int) -> str:
        return f"rank {rank} ({self._devices[rank]} on {self._world.hosts[rank]})"

    def lost(self, rank: int) -> None:
        loaded = self._loaded[rank]
        if not self._stopped and not self._closing and loaded.done() and loaded.exception() is None:
            self._break(EngineError(f"{self._name(rank)} has left the session"))

    def _break(self, error: BaseException) -> None:
        self._world.broken.set()  # a rank hangs, or others wait for it
        super()._break(error)

    def stop(self) -> None:
        """Ask all ranks to leave the session. They can't be ended one by one."""
        self._stopped = True
        self._wire.send(None)

    def join(self, patience: float) -> bool:
        self._reader.join(0.0 if self._world.broken.is_set() else patience)
        return not self._wire.alive

    def clear(self) -> None:
        if not self.join(PATIENCE):
            self._world.broken.set()
