"""Whether a session's ranks are threads of its process, processes that it starts, or those that MPI has started."""

from __future__ import annotations

from collections.abc import Sequence

from splitc.runtime.devices import Device, host_numbers
from splitc.runtime.engines.kinds import has_gpu_each
from splitc.runtime.errors import MisuseError
from splitc.runtime.mpi.world import World

THREADS, PROCESSES, MPI = "threads", "processes", "mpi"
KINDS = (THREADS, PROCESSES, MPI)


def choose_ranks(
    asked: str | None, devices: Sequence[Device], world: World | None, shared: Sequence[Device] = ()
) -> str:
    """What the ranks are: as asked for, or else MPI's processes, where it has started several.

    Otherwise they are processes on several GPUs, where each rank has one of its own. `shared` are the devices of all
    models whose ranks share processes: a model on one GPU has a process there if others have other GPUs. Raises
    MisuseError for an unknown word, and for what is impossible: processes on devices that can't exchange values, as
    NCCL connects GPUs of one rank each, MPI's without MPI, or several hosts without MPI.
    """
    if asked not in (None, *KINDS):
        raise MisuseError(f"ranks are '{THREADS}', '{PROCESSES}' or '{MPI}', not '{asked}'")
    gpus = [device for device in devices if device.kind == "cuda"]
    if asked == PROCESSES and gpus and len(set(gpus)) != len(devices):
        names = ", ".join(map(str, devices))
        raise MisuseError(f"ranks as processes need a GPU each, or no GPU at all, and these are {names}: use threads")
    if asked == MPI and world is None:
        raise MisuseError("MPI has not started several processes of this program: mpirun -n RANKS splitc ...")
    if world is not None and asked in (None, MPI):
        return MPI
    if len(hosts := host_numbers(devices)) > 1:
        raise MisuseError(
            f"these ranks are on {len(hosts)} hosts (host{hosts[0]} to host{hosts[-1]}): start them with mpirun -n "
            f"{len(devices)} splitc ..., or name devices of this machine with -d, as in -d {len(devices)}xcpu"
        )
    others = [*devices, *(each for each in shared if each.kind == "cuda" and each not in devices)]
    several = has_gpu_each(devices if len(devices) > 1 else others)
    return asked or (PROCESSES if several else THREADS)
