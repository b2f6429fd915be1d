"""Which blocks go to which device: an exact search over the cuts, by dynamic programming.

Devices are taken in the order in which the user named them, each for one stage at most. Two objectives: `throughput`
makes the slowest stage (or link) as fast as can be, `latency` the sum of all. Among plans as good, the one with the
fewest stages, then the fewest bytes cut, then the most even loads.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from splitc.runtime.errors import DoesNotFitError, MisuseError
from splitc.runtime.units import format_bytes

OBJECTIVES = ("throughput", "latency")
# Loads that differ by less than this share are the same.
SAME = 1e-9

Floats = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Target:
    """A device to plan for. Its loads go by `speed`; `budget` is in bytes, or None when nothing is known of it."""

    device: str
    speed: float
    budget: int | None


@dataclass(frozen=True)
class StageCosts:
    """What the planner asks of the blocks from number `start` to before number `end`.

    `load` is the time that they take on a device of speed 1 (or any other quantity that adds up), `memory` the bytes
    that they hold, `cut` the bytes that cross before block i, and `link` the time for so many bytes to cross.
    """

    names: Sequence[str]
    load: Callable[[int, int], float]
    memory: Callable[[int, int], int]
    cut: Callable[[int], int]
    link: Callable[[int], float]


@dataclass(frozen=True)
class Assignment:
    """The blocks from `start` to before `end` on the target of this number."""

    target: int
    start: int
    end: int


def plan_stages(
    costs: StageCosts,
    targets: Sequence[Target],
    *,
    objective: str = "throughput",
    spread: bool = False,
    slack: float = 0.0,
) -> list[Assignment]:
    """The best stages, in order. With `spread` every target gets one.

    For throughput the slowest stage may be slower than need be by the share `slack`, where that saves stages or bytes.

    Raises DoesNotFitError when no way to cut fits the budgets, MisuseError for `spread` over more targets than blocks.
    """
    count = len(costs.names)
    if spread and len(targets) > count:
        raise MisuseError(
            f"{len(targets)} devices, and the model can be cut into {count} pieces at most: name fewer devices with -d"
        )
    fits = np.array([[_fitting(costs, start, target) for start in range(count)] for target in targets])
    work = np.array([[costs.load(i, j) if j > i else np.inf for j in range(count + 1)] for i in range(count)])
    loads = np.where(fits, work[None] / np.array([target.speed for target in targets])[:, None, None], np.inf)
    links = np.array([0.0] + [costs.link(costs.cut(i)) for i in range(1, count)])
    if objective == "latency":
        best = _search(loads, np.add, links, spread)
    else:
        slowest = _search(loads, np.maximum, links, spread)
        cut_bytes = [costs.cut(i) for i in range(count)]
        best = slowest and _most_even(loads, links, cut_bytes, slowest[0] * (1 + slack), spread)
    if best is None:
        raise DoesNotFitError(explain_misfit(costs, targets))
    return best[1]


def _fitting(costs: StageCosts, start: int, target: Target) -> npt.NDArray[np.bool_]:
    """For each end whether the blocks from `start` fit the target. More blocks never need less."""
    count = len(costs.names)
    fits = np.ones(count + 1, dtype=bool)
    if target.budget is not None:
        low, high = start, count
        while low < high:
            middle = (low + high + 1) // 2
            low, high = (middle, high) if costs.memory(start, middle) <= target.budget else (low, middle - 1)
        fits[low + 1 :] = False
    return fits


def _search(
    loads: Floats, combine: Callable[[Floats, Floats], Floats], links: Floats, spread: bool
) -> tuple[float, list[Assignment]] | None:
    """The cheapest chain of stages over all blocks, where a chain costs its stages and links, combined.

    `loads[k, i, j]` is the cost of the blocks from i to before j on target k; `links[i]` that of the cut before i.
    Returns None when every chain is infinitely expensive.
    """
    targets, count, _ = loads.shape
    # cost[k, j]: the best chain for the blocks before j that ends with target k; came[k, j]: its last stage.
    cost = np.full((targets, count + 1), np.inf)
    came: dict[tuple[int, int], tuple[int, int]] = {}
    for k in range(targets):
        if k == 0 or not spread:
            cost[k] = loads[k, 0]
            came.update({(k, j): (-1, 0) for j in range(count + 1) if np.isfinite(cost[k, j])})
        for before in range(k - 1 if spread else 0, k):
            if before < 0:
                continue
            reached = combine(cost[before, :count], links)
            chains = combine(np.broadcast_to(reached[:, None], loads[k].shape), loads[k])
            start = chains.argmin(axis=0)
            best = chains[start, np.arange(count + 1)]
            for j in np.flatnonzero(best < cost[k]):
                cost[k, j] = best[j]
                came[k, int(j)] = (before, int(start[j]))
    ends = cost[-1:] if spread else cost
    last = int(ends[:, count].argmin()) + (targets - len(ends))
    if not np.isfinite(cost[last, count]):
        return None
    chain: list[Assignment] = []
    k, end = last, count
    while k >= 0:
        before, start_block = came[k, end]
        chain.append(Assignment(k, start_block, end))
        k, end = before, start_block
    return float(cost[last, count]), chain[::-1]


def _most_even(
    loads: Floats, links: Floats, cut_bytes: Sequence[int], slowest: float, spread: bool
) -> tuple[float, list[Assignment]] | None:
    """Of the chains with no stage or link slower than `slowest`: the fewest stages, then bytes, then the most even."""
    limit = slowest * (1 + SAME)
    size = 1.0 + sum(cut_bytes)
    # A stage outweighs all bytes, and bytes outweigh the squares of the loads, which add up to one a stage at most.
    evenness = (loads / max(limit, np.finfo(float).tiny)) ** 2 / (len(loads) + 1)
    chosen = np.where(loads <= limit, size + evenness, np.inf)
    bytes_cut = np.where(links <= limit, np.array(cut_bytes, dtype=float), np.inf)
    return _search(chosen, np.add, bytes_cut, spread)


def explain_misfit(costs: StageCosts, targets: Sequence[Target]) -> str:
    """What was needed and what there was, after filling the devices in order as far as they go."""
    start, count = 0, len(costs.names)
    lines = []
    for target in targets:
        end = start
        while end < count and (target.budget is None or costs.memory(start, end + 1) <= target.budget):
            end += 1
        held = f"{costs.names[start]} to {costs.names[end - 1]}" if end > start else "no block"
        size = format_bytes(costs.memory(start, end) if end > start else 0)
        lines.append(f"  {target.device} holds {held}: {size} of {format_bytes(target.budget)}")
        start = end
    needed, available = costs.memory(0, count), sum(target.budget or 0 for target in targets)
    if start < count:
        first, rest = costs.memory(start, start + 1), costs.memory(start, count)
        lines.append(f"  The first block that does not fit is {costs.names[start]}, which needs {format_bytes(first)}.")
        lines.append(f"  With one more device of {format_bytes(rest)}, it would fit.")
    else:
        lines.append("  Filled in order it fits, but then a device is left with nothing: name fewer devices.")
    short = f", {format_bytes(needed - available)} short" if needed > available else ""
    return (
        f"the model needs {format_bytes(needed)}, and the devices have {format_bytes(available)}{short}:\n"
        + "\n".join(lines)
        + "\nGive the devices more memory (--memory, --headroom), add one (-d), or plan for smaller inputs (--shapes)."
    )
