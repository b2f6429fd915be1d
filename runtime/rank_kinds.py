"""Whether a session's ranks are threads of its process, processes that it starts, or those that MPI has started."""

from __future__ import annotations

from collections.abc import Sequence

from splitc.runtime.devices import Device
from splitc.runtime.engines.kinds import has_gpu_each
from splitc.runtime.errors import MisuseError
from splitc.runtime.mpi.world import World

THREADS, PROCESSES, MPI = "threads", "processes", "mpi"
KINDS = (THREADS, PROCESSES, MPI)


def choose_ranks(asked: str | None, devices: Sequence[Device], world: World | None) -> str:
    """What the ranks are: as asked for, or else MPI's processes, where it has started several.

    Otherwise they are processes on several GPUs, where each rank has one of its own. Raises MisuseError for an unknown
    word, and for what is impossible: processes on devices that can't exchange values, as NCCL connects GPUs of one rank
    each, or MPI's without MPI.
    """
    if asked not in (None, *KINDS):
        raise MisuseError(f"ranks are '{THREADS}', '{PROCESSES}' or '{MPI}', not '{asked}'")
    if asked == PROCESSES and not has_gpu_each(devices) and any(device.kind == "cuda" for device in devices):
        names = ", ".join(map(str, devices))
        raise MisuseError(f"ranks as processes need a GPU each, or no GPU at all, and these are {names}: use threads")
    if asked == MPI and world is None:
        raise MisuseError("MPI has not started several processes of this program: mpirun -n RANKS splitc ...")
    if asked is None and world is not None:
        return MPI
    return asked or (PROCESSES if has_gpu_each(devices) else THREADS)
