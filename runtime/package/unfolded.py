"""A package's ranks in all its replicas, for tables and pages."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from splitc.runtime.package.manifest import Manifest, Rank
from splitc.runtime.package.steps import Receive, Run, Send, Step


def unfolded(manifest: Manifest, devices: Sequence[str] | None = None) -> Manifest:
    """The manifest with one rank for each of these devices, by default the package's.

    For reading only: ranks of further replicas have no files of their own.
    """
    names, size = list(devices or manifest.devices), len(manifest.ranks)
    ranks = []
    for group, first in enumerate(range(0, len(names), size)):
        for number, rank in enumerate(manifest.ranks):
            moved = _moved(rank, names[first + number], first)
            if group < len(manifest.replicas):
                own = manifest.replicas[group]
                held = {name: getattr(own, name)[number] for name in ("activation_bytes", "cache_bytes", "total_bytes")}
                moved = msgspec.structs.replace(moved, **held)
            ranks.append(moved)
    return msgspec.structs.replace(manifest, ranks=ranks)


def count_groups(manifest: Manifest, ranks: int) -> int:
    """The number of groups with the whole model that this number of ranks forms."""
    size = len(manifest.replicas[0].devices) if manifest.replicas else ranks
    return ranks // size


def _moved(rank: Rank, device: str, first: int) -> Rank:
    """A rank of the replica whose first rank has the number `first`."""
    if not first:
        return msgspec.structs.replace(rank, device=device)
    engines = [msgspec.structs.replace(file, group=[first + other for other in file.group]) for file in rank.engines]
    return msgspec.structs.replace(
        rank, device=device, engines=engines, program=[_moved_step(step, first) for step in rank.program]
    )


def _moved_step(step: Step, first: int) -> Step:
    if isinstance(step, Run):
        return step
    if isinstance(step, Send):
        return msgspec.structs.replace(step, target=first + step.target)
    if isinstance(step, Receive):
        return msgspec.structs.replace(step, source=first + step.source)
    return msgspec.structs.replace(step, ranks=[first + rank for rank in step.ranks])
