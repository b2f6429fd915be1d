"""The weights that are whole on every rank, and why."""

from __future__ import annotations

from collections.abc import Sequence

from splitc.runtime.reports.contents import Section, Table
from splitc.runtime.units import format_bytes

# The most weights or reasons that are listed one by one.
LISTED = 200
# The most reasons that are shown at once.
FEW = 5


def whole_section(weights: Sequence[tuple[str, int, str]], where: str) -> Section | None:
    """Weights that could not be split: name, bytes and reason, by reason. None if there are none."""
    if not weights:
        return None
    reasons: dict[str, list[int]] = {}
    for _, size, reason in weights:
        reasons.setdefault(reason, []).append(size)
    largest = sorted(reasons.items(), key=lambda reason: -sum(reason[1]))
    rows = [(format_bytes(sum(sizes)), str(len(sizes)), reason) for reason, sizes in largest]
    every = sorted(weights, key=lambda weight: -weight[1])
    listed = [(format_bytes(size), name, reason) for name, size, reason in every[:LISTED]]
    columns = ("bytes", "weights", "reason")
    title = "Each of them" if len(every) <= LISTED else f"The {LISTED} largest of {len(every)}"
    total = format_bytes(sum(size for _, size, _ in weights))
    return Section(
        f"Whole on {where}",
        [f"{total} in {len(weights)} weights could not be split, or not entirely."],
        tables=[
            Table("Why", columns, rows[:FEW], columns[:2], folded=False),
            *([Table(f"All {len(rows)} reasons", columns, rows[:LISTED], columns[:2])] if len(rows) > FEW else []),
            Table(title, ("bytes", "weight", "reason"), listed, ("bytes",)),
        ],
    )
