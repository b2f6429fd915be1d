"""Shared memory that libraries leave behind if their processes are killed: files of theirs in /dev/shm."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path


def find_mapped(process: int, prefix: str) -> set[str]:
    """The files with names that begin so which a process has in its memory; none if it has ended, or without /proc."""
    try:
        # Other files have names of any bytes.
        maps = Path(f"/proc/{process}/maps").read_text(errors="surrogateescape")
    except OSError:
        return set()
    return set(re.findall(rf"/dev/shm/{re.escape(prefix)}\S+", maps))


def remove_files(files: Iterable[str]) -> None:
    """Remove those that are still there. Memory lives on as long as a process has it."""
    for file in files:
        Path(file).unlink(missing_ok=True)
