"""The ranks of a session as the processes that MPI has started. Process 0 has the session, and is rank 0 too."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Sequence

from splitc.runtime.errors import EngineError, MisuseError, PackageError
from splitc.runtime.hardware.devices import Device
from splitc.runtime.ipc.channel import portable
from splitc.runtime.mpi.hosts import why_not_placed
from splitc.runtime.mpi.life import SILENCE
from splitc.runtime.mpi.messages import AllLoaded, Join, Left, Stop
from splitc.runtime.mpi.messenger import LANES
from splitc.runtime.mpi.rank import run_rank
from splitc.runtime.mpi.wire import MpiWire, OwnControl
from splitc.runtime.mpi.world import World
from splitc.runtime.processes.launch import SPIN, has_spare_cores
from splitc.runtime.processes.messages import Broken
from splitc.runtime.processes.reader import LATE, MOST, Reader
from splitc.runtime.processes.remote import PATIENCE, RemoteRanks
from splitc.runtime.ranks.deployment import Deployment

# Numbers of sessions.
_NUMBERS = itertools.count()
_ONE_AT_A_TIME = threading.Lock()


class MpiRanks(RemoteRanks):
    """The ranks of a package, once they are started, each a process of MPI's. For `verify` see Session.

    Raises PackageError if hosts have other versions, MisuseError if there are more or fewer processes than ranks, or
    not where they were planned.
    """

    _wire: MpiWire

    def __init__(
        self, world: World, deployment: Deployment, verify: str, broken: Callable[[BaseException], None]
    ) -> None:
        super().__init__(deployment, broken)
        devices = deployment.all_devices
        if world.size != len(devices):
            raise MisuseError(
                f"the package has {len(devices)} ranks, and MPI started {world.size} processes: use mpirun -n "
                f"{len(devices)}"
            )
        _check_hosts(world, devices)
        if world.broken.is_set():
            raise EngineError("an earlier session of this program broke, so its ranks can't be used again: start anew")
        self._everyone = world
        self._world = world.part(deployment.first, len(deployment.devices))
        number = next(_NUMBERS)
        # Replicas are heard each by a thread of its own. Lane 0 has also what is said between sessions.
        lane = number % (LANES - 1) + 1 if deployment.first else 0
        self._control = world.control.in_lane(lane) if lane else world.control
        spin = SPIN if has_spare_cores(devices) else 0.0
        self._join = Join(
            number=number,
            package=deployment.package,
            seal=deployment.manifest.sha256,
            devices=tuple(devices),
            threads=deployment.threads,
            verify=verify,
            cuda_graphs=deployment.cuda_graphs,
            spin=spin,
            first=deployment.first,
            size=len(deployment.devices),
            lane=lane,
        )

    def start(self) -> None:
        """See RemoteRanks. If it fails, the program's end will end the ranks.

        Raises MisuseError if these processes are ranks of an open session.
        """
        with _ONE_AT_A_TIME:
            other = self._world.served.get(self._first)
            if other is not None and not other.join(0.0):
                raise MisuseError(
                    "a session of this program is open, and has all processes that MPI started as its ranks: close it "
                    "before you open another one"
                )
            self._start()
            self._world.served[self._first] = self

    def _start(self) -> None:
        world, own = self._world, None if self._first else OwnControl()
        try:
            for process in range(max(1, self._first), self._first + world.size):
                world.control.send(process, (self._join, None))
            if own is not None:
                threading.Thread(target=self._run_own, args=(own,), name="splitc rank 0", daemon=True).start()
            spin = LATE * MOST if self._join.spin else 0.0
            self._wire = MpiWire(self._control, world.machines, own, spin, self._first)
            # It does not busy-wait, which would keep Python's lock from rank 0's thread.
            self._reader = Reader(self._wire, self._receive, self._is_waiting, spins=False)
        except BaseException:  # there may be too many threads
            world.broken.set()
            raise

    def wait_loaded(self) -> None:
        """See RemoteRanks."""
        super().wait_loaded()
        self._wire.send(AllLoaded())

    def _run_own(self, own: OwnControl) -> None:
        try:
            run_rank(self._everyone, self._join, own)
        except BaseException as error:  # a thread has no caller, and the session waits for this rank
            own.send(Broken(portable(error), None))
        finally:
            own.send(Left())

    def _silent(self, rank: int) -> tuple[float, float]:
        process = self._first + rank
        return (self._world.life.silent(process) if process else 0.0), SILENCE

    def _name(self, rank: int) -> str:
        return f"rank {self._first + rank} ({self._devices[rank]} on {self._world.hosts[rank]})"

    def _lost(self, rank: int) -> None:
        loaded = self._loaded[rank]
        could_not_load = loaded.done() and loaded.exception() is not None
        if not self._stopped and not self._closing and not could_not_load:
            left = EngineError(f"{self._name(rank)} has left the session")
            self._break(left if self._suspect is None else self._suspect[2])

    def _break(self, error: BaseException) -> None:
        self._world.broken.set()  # a rank hangs, or others wait for it
        super()._break(error)

    def stop(self) -> None:
        """Ask all ranks to leave the session. They can't be ended one by one."""
        self._stopped = True
        self._wire.send(Stop())

    def join(self, patience: float) -> bool:
        return self._reader.join(0.0 if self._world.broken.is_set() else patience)

    def clear(self) -> None:
        if not self.join(PATIENCE):
            self._world.broken.set()


def _check_hosts(world: World, devices: Sequence[Device]) -> None:
    """Raise an error if processes are not where ranks were planned, or have another splitc."""
    if (why := why_not_placed(devices, world.machines, world.hosts)) is not None:
        raise MisuseError(why)
    for host, version in zip(world.hosts, world.versions, strict=True):
        if version != world.versions[0]:
            raise PackageError(
                f"{host} has splitc {version}, and {world.hosts[0]} {world.versions[0]}: install the same everywhere"
            )
