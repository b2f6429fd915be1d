"""Files that MPICH leaves behind when a job is killed: it removes those of its shared memory at its end alone."""

from __future__ import annotations

import re
from contextlib import suppress
from pathlib import Path

_MAPPED = re.compile(r"(/dev/shm/mpich_shm_\S+)$", re.MULTILINE)


def remove_early() -> None:
    """Remove the names of MPICH's shared memory, which lives as long as a process uses it.

    To be called when all processes have opened it.
    """
    with suppress(OSError):  # other systems than Linux
        for name in set(_MAPPED.findall(Path("/proc/self/maps").read_text())):
            Path(name).unlink(missing_ok=True)
