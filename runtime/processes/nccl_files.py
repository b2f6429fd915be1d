"""Shared memory that NCCL leaves behind if one of its processes is killed: files of its own in /dev/shm."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path

_NAME = re.compile(r"/dev/shm/nccl-\S+")


def find_nccl_files(process: int) -> set[str]:
    """The files that a process has in its memory; none if it has ended, or where there is no /proc."""
    try:
        # Other files have names of any bytes.
        return set(_NAME.findall(Path(f"/proc/{process}/maps").read_text(errors="surrogateescape")))
    except OSError:
        return set()


def remove_nccl_files(files: Iterable[str]) -> None:
    """Remove those that are still there. Their processes must have ended."""
    for file in files:
        Path(file).unlink(missing_ok=True)
