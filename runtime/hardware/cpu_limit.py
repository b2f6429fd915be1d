"""The limit of this process's control groups on the time of cores, such as a container's --cpus. Linux has such."""

from __future__ import annotations

import math
from functools import cache
from pathlib import Path, PurePosixPath


@cache
def cpu_limit(root: Path = Path("/")) -> float:
    """How many cores' time this process may take together with the others of its groups; infinity without a limit."""
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return math.inf
    limits = [math.inf]
    for line in lines:
        _, controllers, name = line.split(":", 2)
        if controllers and "cpu" not in controllers.split(","):
            continue
        mounted = root / "sys/fs/cgroup" / ("cpu" if controllers else "")
        # Each group is limited by those that it is in. A container may see its own as the outermost.
        group = PurePosixPath(name)
        limits += [_limit_of(mounted / str(each).lstrip("/")) for each in (group, *group.parents)]
    return min(limits)


def _limit_of(folder: Path) -> float:
    """The limit of one group, of the second version of control groups or the first."""
    try:
        if (file := folder / "cpu.max").exists():
            quota, period = file.read_text().split()
        else:
            quota, period = ((folder / f"cpu.cfs_{name}_us").read_text().strip() for name in ("quota", "period"))
    except OSError:  # no limit can be set here
        return math.inf
    return math.inf if quota in ("max", "-1") else int(quota) / int(period)
