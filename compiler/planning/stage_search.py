"""Which blocks go to which device: an exact search over the cuts, by dynamic programming.

Devices are used in the user's order, each for one stage at most. The objective `throughput` minimizes the time of the
slowest stage or link; `latency` minimizes the sum of all. Ties go to the fewest stages, and then to the most evenly
spread weights; for throughput, to these and the fewest bytes cut (`_most_even`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from splitc.compiler.errors import CannotSplitError
from splitc.runtime.errors import DoesNotFitError
from splitc.runtime.units import format_bytes

# Costs that differ by less than this share are equal.
SAME = 1e-9

Floats = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Target:
    """A device to plan for. `budget` is in bytes, or None if it is not known.

    `load` is the number of the load that it takes, which is divided by its `speed`.
    `engines` are the bytes of that which its engines' libraries take. `most_weights` limits the bytes of weights alone.
    `host` is where it is; None is this machine.
    """

    device: str
    speed: float
    budget: int | None
    engines: int = 0
    load: int = 0
    most_weights: int | None = None
    host: int | None = None

    @property
    def room(self) -> int | None:
        """Bytes for the blocks."""
        return None if self.budget is None else self.budget - self.engines


@dataclass(frozen=True)
class StageCosts:
    """What the planner asks about the blocks from number `start` to before number `end`.

    Each of `loads` is their time on a kind of device of speed 1, or any other additive quantity. `weights` are the
    bytes of their weights, and `exact` all bytes that they hold. `memory` is a lower bound of these that is found
    quickly. `cut` are the bytes that cross before block i, and `link` is the time for a number of bytes to cross, to a
    target of another host or (False) of the same one.
    """

    names: Sequence[str]
    loads: Sequence[Callable[[int, int], float]]
    weights: Callable[[int, int], int]
    memory: Callable[[int, int], int]
    exact: Callable[[int, int], int]
    cut: Callable[[int], int]
    link: Callable[[int, bool], float]


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

    For throughput the slowest stage may exceed the optimum by the share `slack`, if that saves cut bytes or spreads
    the weights more evenly.

    Raises DoesNotFitError if no cuts fit the budgets, CannotSplitError if there are more targets than blocks.
    """
    count = len(costs.names)
    if len(targets) > count:
        raise CannotSplitError(
            f"{len(targets)} devices, and the model can be cut into {count} pieces at most: name fewer devices with -d"
        )
    limits = {(target.room, target.most_weights) for target in targets}  # the same for most of them
    fitting = {each: np.array([_fitting(costs, start, *each) for start in range(count)]) for each in limits}
    work = [
        np.array([[load(i, j) if j > i else np.inf for j in range(count + 1)] for i in range(count)])
        for load in costs.loads
    ]
    times = np.array([work[target.load] / target.speed for target in targets])
    uneven = _unevenness(costs)
    while True:
        fits = np.array([fitting[target.room, target.most_weights] for target in targets])
        chain = _cheapest(costs, targets, np.where(fits, times, np.inf), uneven, objective, spread, slack)
        if chain is None:
            raise DoesNotFitError(explain_misfit(costs, targets))
        misfits = [each for each in chain if not _fits_exactly(costs, targets[each.target], each)]
        if not misfits:
            return chain
        for each in misfits:  # its first block may go with fewer others than the bound says
            target = targets[each.target]
            row = fitting[target.room, target.most_weights][each.start]
            row &= _fitting(replace(costs, memory=costs.exact), each.start, target.room, target.most_weights)
            row[each.end] = False


def _fits_exactly(costs: StageCosts, target: Target, each: Assignment) -> bool:
    return target.room is None or costs.exact(each.start, each.end) <= target.room


def _cheapest(
    costs: StageCosts,
    targets: Sequence[Target],
    loads: Floats,
    uneven: Floats,
    objective: str,
    spread: bool,
    slack: float,
) -> list[Assignment] | None:
    """The best stages if the blocks from i to before j take `loads[k, i, j]` on target k; None if there are none.

    `uneven[i, j]` is how far such a stage is from holding the same as others (`_unevenness`).
    """
    count = len(costs.names)
    sides = np.array([[0.0] + [costs.link(costs.cut(i), far) for i in range(1, count)] for far in (False, True)])
    links = _Links(sides, np.array([[int(one.host != other.host) for other in targets] for one in targets]))
    combine = np.add if objective == "latency" else np.maximum
    by_stages = _search(loads, combine, links)
    if spread:
        by_stages = {stages: chain for stages, chain in by_stages.items() if stages == len(targets)}
    if not by_stages:
        return None
    best = min(chain.cost for chain in by_stages.values())
    stages = min(stages for stages, chain in by_stages.items() if chain.cost <= best * (1 + SAME))
    if objective == "latency":
        tie_break = best * SAME * uneven / max(1, costs.weights(0, count))
        return _search(loads + tie_break, combine, links)[stages].assignments
    return _most_even(costs, loads, links, uneven, best * (1 + max(slack, SAME)))[stages].assignments


def _fitting(costs: StageCosts, start: int, budget: int | None, most_weights: int | None) -> npt.NDArray[np.bool_]:
    """For each end whether the blocks from `start` fit a target. By bisection, since more blocks never need less.

    All of them are tried first: where they fit, as small blocks by the thousand do, nothing else is measured.
    """
    count = len(costs.names)
    fits = np.ones(count + 1, dtype=bool)
    for limit, measure in ((budget, costs.memory), (most_weights, costs.weights)):
        if limit is not None:
            low, high = start, count
            if measure(start, count) <= limit:
                low = count
            while low < high:
                middle = (low + high + 1) // 2
                low, high = (middle, high) if measure(start, middle) <= limit else (low, middle - 1)
            fits[low + 1 :] = False
    return fits


@dataclass(frozen=True)
class _Chain:
    """Stages over all blocks, and what they cost."""

    cost: float
    assignments: list[Assignment]


@dataclass(frozen=True)
class _Links:
    """What it costs to cross each cut: `costs[0]` between targets of one host, `costs[1]` between hosts.

    `far[k, l]` is 1 if the targets k and l are on two hosts, and otherwise 0.
    """

    costs: Floats
    far: npt.NDArray[np.int_]


def _search(loads: Floats, combine: Callable[[Floats, Floats], Floats], links: _Links) -> dict[int, _Chain]:
    """The cheapest chain for each number of stages. A chain's cost is that of its stages and links, by `combine`.

    `loads[k, i, j]` is the cost of the blocks from i to before j on target k. Numbers of stages without a chain of
    finite cost are left out.
    """
    targets, count, _ = loads.shape
    starts, ends = np.arange(count), np.arange(count + 1)
    # cost[s, k, j]: the best chain of s + 1 stages for the blocks before j, the last of them on target k.
    cost = np.full((targets, targets, count + 1), np.inf)
    # came[s, k, j]: the target of the stage before the last one, and the last one's first block.
    came = np.zeros((targets, targets, count + 1, 2), dtype=int)
    cost[0] = loads[:, 0]
    for stages in range(1, targets):
        for k in range(stages, targets):
            reached = combine(cost[stages - 1, stages - 1 : k, :count], links.costs[links.far[k, stages - 1 : k]])
            before = reached.argmin(axis=0)  # the best one for each first block
            chains = combine(reached[before, starts][:, None], loads[k])
            start = chains.argmin(axis=0)
            cost[stages, k] = chains[start, ends]
            came[stages, k] = np.stack([stages - 1 + before[start], start], axis=1)
    found = {}
    for stages in range(targets):
        last = int(cost[stages, :, count].argmin())
        if np.isfinite(cost[stages, last, count]):
            found[stages + 1] = _Chain(float(cost[stages, last, count]), _trace(came, stages, last, count))
    return found


def _trace(came: npt.NDArray[np.int_], stages: int, target: int, end: int) -> list[Assignment]:
    chain: list[Assignment] = []
    for number in range(stages, -1, -1):
        before, start = map(int, came[number, target, end]) if number else (0, 0)
        chain.append(Assignment(target, start, end))
        target, end = before, start
    return chain[::-1]


def _most_even(costs: StageCosts, loads: Floats, links: _Links, uneven: Floats, slowest: float) -> dict[int, _Chain]:
    """For each number of stages the chain with the fewest bytes cut and the most evenly spread weights.

    It minimizes bytes cut + the sum of squares of the stages' weight bytes / all weight bytes. The second term is least
    if all stages hold the same. No stage or link is slower than `slowest`.
    """
    cut_bytes = np.array([0.0] + [costs.cut(number) for number in range(1, len(costs.names))])
    fast_enough = np.where(loads <= slowest, uneven, np.inf)
    return _search(fast_enough, np.add, replace(links, costs=np.where(links.costs <= slowest, cut_bytes, np.inf)))


def _unevenness(costs: StageCosts) -> Floats:
    """For each first block and end the square of the stage's weight bytes / all weight bytes."""
    count = len(costs.names)
    held = [[costs.weights(i, j) if j > i else 0 for j in range(count + 1)] for i in range(count)]
    return np.array(held, dtype=float) ** 2 / max(1, costs.weights(0, count))


def explain_misfit(costs: StageCosts, targets: Sequence[Target]) -> str:
    """A message with the bytes needed and available, and what each device holds if they are filled in order."""
    start, count = 0, len(costs.names)
    lines = []
    for target in targets:
        end = _filled(costs, target, start)
        held = f"{costs.names[start]} to {costs.names[end - 1]}" if end > start else "no block"
        size = format_bytes(target.engines + (costs.exact(start, end) if end > start else 0))
        lines.append(f"  {target.device} holds {held}: {size} of {format_bytes(target.budget)}")
        start = end
    needed, available = costs.exact(0, count), sum(max(0, target.room or 0) for target in targets)
    if start < count:
        first, rest = costs.exact(start, start + 1), costs.exact(start, count)
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


def _filled(costs: StageCosts, target: Target, start: int) -> int:
    """The end of the most blocks from `start` that fit a target."""
    room, end = target.room, len(costs.names)
    if room is None:
        return end
    while end > start and (costs.memory(start, end) > room or costs.exact(start, end) > room):
        end -= 1
    return end
