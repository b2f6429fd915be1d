"""The limits of this process's control groups on Linux, such as a container's --cpus and --memory."""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import cache
from pathlib import Path, PurePosixPath

# A group's memory files, in version 2 of control groups and in version 1: its limits, its usage, and the prefix of its
# statistics. Beyond memory.high processes are not ended but slowed down, until they wait more than they run.
_MEMORY = (
    (("memory.max", "memory.high"), "memory.current", ""),
    (("memory.limit_in_bytes",), "memory.usage_in_bytes", "total_"),
)
# Version 1 says LONG_MAX, in whole pages, where there is no limit.
_NO_LIMIT = 1 << 62


@cache
def cpu_limit(root: Path = Path("/")) -> float:
    """The cores that this process may use, together with the others of its groups; infinity without a limit."""
    return min(map(_cores_of, _groups("cpu", root)), default=math.inf)


def memory_limit(root: Path = Path("/")) -> tuple[float, float]:
    """The bytes that this process may use, together with the others of its groups, and the free ones of these.

    Infinity without a limit.
    """
    limits, free = zip((math.inf, math.inf), *map(_memory_of, _groups("memory", root)), strict=True)
    return min(limits), min(free)


def _groups(controller: str, root: Path) -> Iterator[Path]:
    """The folders of the groups that limit this process. Some may not be there."""
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return
    for line in lines:
        _, controllers, name = line.split(":", 2)
        if controllers and controller not in controllers.split(","):
            continue
        mounted = root / "sys/fs/cgroup" / (controller if controllers else "")
        # Each group is limited by those that it is in. A container may see its own as the outermost.
        group = PurePosixPath(name)
        for folder in (group, *group.parents):
            yield mounted / str(folder).lstrip("/")


def _cores_of(folder: Path) -> float:
    """The limit of one group, of either version of control groups."""
    try:
        if (file := folder / "cpu.max").exists():
            quota, period = file.read_text().split()
        else:
            quota, period = ((folder / f"cpu.cfs_{name}_us").read_text().strip() for name in ("quota", "period"))
    except OSError:  # no limit can be set here
        return math.inf
    return math.inf if quota in ("max", "-1") else int(quota) / int(period)


def _memory_of(folder: Path) -> tuple[float, float]:
    """The limit of one group, and what is free of it: the system drops cached files when memory is needed."""
    for limits, used, prefix in _MEMORY:
        limit = min(_bytes_of(folder / name) for name in limits)
        if math.isinf(limit):
            continue
        try:
            statistics = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
            files = sum(int(statistics[f"{prefix}{kind}_file"]) for kind in ("active", "inactive"))
            return limit, limit - int((folder / used).read_text()) + files
        except (OSError, KeyError, ValueError):  # what is used is not said here, or otherwise, as in sandboxes
            return limit, limit
    return math.inf, math.inf


def _bytes_of(limit: Path) -> float:
    try:
        text = limit.read_text().strip()
    except OSError:  # no limit can be set here
        return math.inf
    return math.inf if text == "max" or int(text) >= _NO_LIMIT else int(text)
