"""Small files that this machine keeps from run to run: what was measured on it."""

from __future__ import annotations

import os
from pathlib import Path


def cache_file(name: str) -> Path:
    """Where the file of this name is kept."""
    home = os.environ.get("XDG_CACHE_HOME")
    return (Path(home) if home else Path.home() / ".cache") / "splitc" / name


def read_cache(name: str) -> bytes:
    """What the file holds; nothing where it is not there."""
    try:
        return cache_file(name).read_bytes()
    except OSError:
        return b""


def write_cache(name: str, content: bytes) -> None:
    """Write the file, whole or not at all: other processes may read and write it at the same time."""
    path = cache_file(name)
    path.parent.mkdir(parents=True, exist_ok=True)
    aside = path.with_suffix(f".{os.getpid()}")
    aside.write_bytes(content)
    aside.replace(path)
