"""Which blocks go to which device: an exact search over the cuts.

Every device gets one stage, in the order in which the user named them. Among all ways to cut, those are best whose
most loaded stage, for its device's share, is loaded least; among those, the one that sends the fewest bytes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from splitc.runtime.errors import DoesNotFitError, MisuseError
from splitc.runtime.units import format_bytes


@dataclass(frozen=True)
class Target:
    """A device to plan for: its share of the work (any scale), and its memory in bytes or None when not limited."""

    device: str
    share: float
    budget: int | None


@dataclass(frozen=True)
class StageCosts:
    """What the planner asks of the blocks from `start` to before `end`: load in any unit, and bytes of memory.

    `cut` is the bytes that cross before block i.
    """

    names: Sequence[str]
    load: Callable[[int, int], float]
    memory: Callable[[int, int], int]
    cut: Callable[[int], int]


def plan_stages(costs: StageCosts, targets: Sequence[Target]) -> list[int]:
    """For each target, in order, the number of its last block plus one.

    Raises MisuseError for more devices than blocks, DoesNotFitError when no way to cut fits the budgets.
    """
    count = len(costs.names)
    if len(targets) > count:
        raise MisuseError(
            f"{len(targets)} devices, and the model can be cut into {count} pieces at most: name fewer devices with -d"
        )

    def relative(start: int, end: int, target: Target) -> float:
        if end <= start or (target.budget is not None and costs.memory(start, end) > target.budget):
            return math.inf
        return costs.load(start, end) / target.share

    table = [[[relative(i, j, target) for j in range(count + 1)] for i in range(count)] for target in targets]
    most = _least_maximum(table, count)
    if most == math.inf:
        raise DoesNotFitError(explain_misfit(costs, targets))
    return _fewest_bytes(table, count, most, costs.cut)


def _least_maximum(table: list[list[list[float]]], count: int) -> float:
    """The load of the most loaded stage in the best of all ways to cut; infinite when none fits."""
    # best[j]: the targets so far hold the blocks before j.
    best = [0.0] + [math.inf] * count
    for loads in table:
        best = [
            min((max(best[i], loads[i][j]) for i in range(j) if best[i] < math.inf), default=math.inf)
            for j in range(count + 1)
        ]
    return best[count]


def _fewest_bytes(table: list[list[list[float]]], count: int, most: float, cut: Callable[[int], int]) -> list[int]:
    """The ends of the stages with the fewest bytes cut, none loaded more than `most`."""
    best: list[tuple[float, list[int]]] = [(0, [])] + [(math.inf, [])] * count
    for loads in table:
        best = [
            min(
                (
                    (best[i][0] + (cut(i) if i else 0), [*best[i][1], j])
                    for i in range(j)
                    if best[i][0] < math.inf and loads[i][j] <= most
                ),
                default=(math.inf, []),
            )
            for j in range(count + 1)
        ]
    return best[count][1]


def explain_misfit(costs: StageCosts, targets: Sequence[Target]) -> str:
    """What was needed and what there was, after filling the devices in order as far as they go."""
    start = 0
    lines = []
    for target in targets:
        end = start
        while end < len(costs.names) and (target.budget is None or costs.memory(start, end + 1) <= target.budget):
            end += 1
        held = costs.memory(start, end) if end > start else 0
        held_names = f"{costs.names[start]} to {costs.names[end - 1]}" if end > start else "no block"
        lines.append(f"  {target.device}: holds {held_names}, {format_bytes(held)} of {format_bytes(target.budget)}")
        start = end
    available = sum(target.budget or 0 for target in targets)
    needed = costs.memory(0, len(costs.names))
    if start < len(costs.names):
        rest = costs.memory(start, len(costs.names))
        size = format_bytes(costs.memory(start, start + 1))
        lines.append(f"  The first block that does not fit is {costs.names[start]}, of {size}.")
        lines.append(f"  {format_bytes(rest)} are left without a place.")
    else:
        # Filled in order everything fits, but then some device is left empty.
        lines.append("  There are more devices than the model needs in this order; name fewer.")
    return (
        f"the model needs {format_bytes(needed)} and the devices have {format_bytes(available)}"
        + (f", {format_bytes(needed - available)} short" if needed > available else "")
        + ":\n"
        + "\n".join(lines)
        + "\nGive the devices more memory (--memory), add a device (-d), or plan for smaller inputs (--shapes)."
    )
