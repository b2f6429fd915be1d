"""A disk that gets full: a command in a namespace of its own, with a small file system at a folder."""

from __future__ import annotations

import functools
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

SCRIPT = 'mount -t tmpfs -o size="$1"k none "$2" || exit 99; cd "$2"; shift 2; "$@"; code=$?; ls -A; exit $code'


@functools.cache
def is_possible() -> bool:
    """Whether users of this machine may mount file systems of their own."""
    if sys.platform != "linux":
        return False
    try:
        return on_small_disk(Path("/mnt"), 100, ["true"])[0] == 0
    except OSError:  # no command `unshare`
        return False


def on_small_disk(place: Path, kilobytes: int, command: Sequence[object]) -> tuple[int, str, list[str]]:
    """Run a command in the folder `place` with so much space. Returns its exit code, its errors and the files there."""
    words = [*map(str, command)]
    found = subprocess.run(
        ["unshare", "-rm", "sh", "-c", SCRIPT, "sh", str(kilobytes), str(place), *words],
        capture_output=True,
        text=True,
        timeout=120,
    )
    return found.returncode, found.stderr, found.stdout.splitlines()
