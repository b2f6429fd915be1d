"""Files that MPI leaves behind when a job is killed: it removes those of its shared memory at its end alone."""

from __future__ import annotations

import os

from splitc.runtime.ipc.mapped_files import find_mapped, remove_files

# What the names of MPICH's and Open MPI's begin with.
NAMES = ("mpich_shm_", "sm_segment.")


def remove_early() -> None:
    """Remove the names of shared memory, when all processes have opened it."""
    for name in NAMES:
        remove_files(find_mapped(os.getpid(), name))
