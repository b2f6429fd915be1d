"""Shared memory that NCCL leaves behind if one of its processes is killed."""

from __future__ import annotations

from splitc.runtime.ipc.mapped_files import find_mapped


def find_nccl_files(process: int) -> set[str]:
    """The files that a process has in its memory: see `find_mapped`. To remove them, all processes must have them."""
    return find_mapped(process, "nccl-")
