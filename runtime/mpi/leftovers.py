"""Files that MPICH leaves behind when a job is killed: it removes those of its shared memory at its end alone."""

from __future__ import annotations

import os

from splitc.runtime.ipc.mapped_files import find_mapped, remove_files


def remove_early() -> None:
    """Remove the names of MPICH's shared memory, when all processes have opened it."""
    remove_files(find_mapped(os.getpid(), "mpich_shm_"))
