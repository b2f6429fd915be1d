"""The kind of a session's ranks: threads, processes that the session starts, or processes of MPI."""

from __future__ import annotations

from collections.abc import Sequence

from splitc.runtime.errors import MisuseError
from splitc.runtime.hardware.devices import Device, host_numbers
from splitc.runtime.mpi.world import World

THREADS, PROCESSES, MPI = "threads", "processes", "mpi"
KINDS = (THREADS, PROCESSES, MPI)


def choose_ranks(
    asked: str | None, devices: Sequence[Device], world: World | None, shared: Sequence[Device] = ()
) -> str:
    """The kind of ranks: as asked for; or else MPI's processes, if it has started several.

    Otherwise threads on CPU devices and on a single GPU, and processes elsewhere. `shared` are the devices of all
    models whose ranks share processes: a model on one GPU has a process if others have other GPUs. Raises MisuseError
    for an unknown word, and for an impossible choice: several threads with a GPU among their devices, MPI's processes
    without MPI, or several hosts without MPI.
    """
    if asked not in (None, *KINDS):
        raise MisuseError(f"--ranks is '{THREADS}', '{PROCESSES}' or '{MPI}', not '{asked}'")
    gpus = {device for device in (*devices, *shared) if device.kind == "cuda"}
    need_processes = len(devices) > 1 and any(device.kind == "cuda" for device in devices)
    if asked == THREADS and need_processes:
        names = ", ".join(map(str, devices))
        raise MisuseError(f"ranks are threads on CPU devices, or on one GPU, and these are {names}: leave --ranks out")
    if asked == MPI and world is None:
        raise MisuseError("MPI has not started several processes of this program: mpirun -n RANKS splitc ...")
    if world is not None and asked in (None, MPI):
        return MPI
    if len(hosts := host_numbers(devices)) > 1:
        raise MisuseError(
            f"these ranks are on {len(hosts)} hosts (host{hosts[0]} to host{hosts[-1]}): start them with mpirun -n "
            f"{len(devices)} splitc ..., or name devices of this machine (-d), as in {len(devices)}xcpu"
        )
    has_gpu = devices[0].kind == "cuda"
    return asked or (PROCESSES if need_processes or (has_gpu and len(gpus) > 1) else THREADS)
