"""The shared memory of a process."""

from __future__ import annotations

import os
from pathlib import Path


def mapped(pid: int | None = None) -> int:
    """The bytes of splitc's shared memory that a process maps; default: this process."""
    lines = Path(f"/proc/{pid or os.getpid()}/maps").read_text().splitlines()
    ours = [line.split()[0].split("-") for line in lines if "memfd:splitc" in line]
    return sum(int(end, 16) - int(begin, 16) for begin, end in ours)
