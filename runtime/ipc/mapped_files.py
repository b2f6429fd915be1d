"""Shared memory that libraries leave behind if their processes are killed: their files in /dev/shm."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from pathlib import Path

# What the names of NCCL's files begin with, and those of MPICH and Open MPI.
NCCL, MPI = ("nccl-",), ("mpich_shm_", "sm_segment.")


def find_mapped(process: int, prefixes: Sequence[str]) -> set[str]:
    """The files that a process has mapped, of those with such names; none if it has ended, or without /proc.

    They may be removed once all processes that share them have mapped them.
    """
    try:
        # Other files have names of any bytes.
        maps = Path(f"/proc/{process}/maps").read_text(errors="surrogateescape")
    except OSError:
        return set()
    return set(re.findall(rf"/dev/shm/(?:{'|'.join(map(re.escape, prefixes))})\S+", maps))


def remove_files(files: Iterable[str]) -> None:
    """Remove those that are still there. Memory lives on as long as a process has it mapped."""
    for file in files:
        Path(file).unlink(missing_ok=True)
