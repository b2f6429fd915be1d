"""Assigns blocks to devices: an exact search over the cuts, by dynamic programming.

Devices are used in the user's order, each for at most one stage. The objective `throughput` minimizes the time of the
slowest stage or link, `latency` the sum of all times. Ties go to the fewest stages, then to the most evenly spread
weights; for throughput, to the fewest stages, then to the fewest bytes cut and evenly spread weights (`_most_even`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from splitc.compiler.errors import CannotSplitError
from splitc.runtime.errors import DoesNotFitError
from splitc.runtime.units import format_bytes

# Costs that differ by less than this share are equal. It is more than rounding errors of sums of doubles, and less than
# any measured difference.
SAME = 1e-9

Floats = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Target:
    """A device to plan for. `budget` is in bytes, or None if it is not known.

    - `engines`: the bytes of the budget that engines' libraries take.
    - `most_weights`: the limit for the bytes of weights.
    - `load`: the number of its load in StageCosts, which is divided by its `speed`.
    - `host`: the host's number; None for this machine.
    """

    device: str
    speed: float
    budget: int | None
    engines: int = 0
    load: int = 0
    most_weights: int | None = None
    host: int | None = None

    @property
    def capacity(self) -> int | None:
        """The bytes for the blocks."""
        return None if self.budget is None else self.budget - self.engines


@dataclass(frozen=True)
class StageCosts:
    """The costs of the blocks from number `start` to before number `end`.

    - `loads`: each is their time on a kind of device of speed 1, or any other additive quantity.
    - `weights`: the bytes of their weights.
    - `exact`: all bytes that they hold. `memory`: a lower bound of these that is computed quickly.
    - `cut`: the bytes that cross before block i.
    - `link`: the time for a number of bytes to cross, to a target on another host (True) or on the same one.
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
    """The blocks from `start` to before `end`, on this target."""

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

    For throughput, the slowest stage may exceed the optimum by the share `slack`, if that saves cut bytes or spreads
    the weights more evenly.

    Raises DoesNotFitError if no cuts fit the budgets, CannotSplitError if there are more targets than blocks.
    """
    count = len(costs.names)
    if len(targets) > count:
        most = f"can be cut into {count} pieces at most" if count > 1 else "can't be cut"
        raise CannotSplitError(f"{len(targets)} devices, and the model {most}: name fewer devices with -d")
    limits = {(target.capacity, target.most_weights) for target in targets}  # the same for most of them
    fitting = {limit: np.array([_fitting(costs, start, *limit) for start in range(count)]) for limit in limits}
    work = [
        np.array([[load(i, j) if j > i else np.inf for j in range(count + 1)] for i in range(count)])
        for load in costs.loads
    ]
    times = np.array([work[target.load] / target.speed for target in targets])
    uneven = _unevenness(costs)
    while True:
        fits = np.array([fitting[target.capacity, target.most_weights] for target in targets])
        chain = _cheapest(costs, targets, np.where(fits, times, np.inf), uneven, objective, spread, slack)
        if chain is None:
            raise DoesNotFitError(explain_misfit(costs, targets))
        misfits = [stage for stage in chain if not _fits_exactly(costs, targets[stage.target], stage)]
        if not misfits:
            return chain
        for stage in misfits:  # fewer blocks fit, from its first one on, than the lower bound says
            target = targets[stage.target]
            row = fitting[target.capacity, target.most_weights][stage.start]
            row &= _fitting(replace(costs, memory=costs.exact), stage.start, target.capacity, target.most_weights)
            row[stage.end] = False


def _fits_exactly(costs: StageCosts, target: Target, stage: Assignment) -> bool:
    return target.capacity is None or costs.exact(stage.start, stage.end) <= target.capacity


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

    `uneven[i, j]` is the unevenness of such a stage (`_unevenness`).
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
    """For each end, whether the blocks from `start` fit a target. By bisection, since more blocks never need less.

    All blocks are tried first: if they fit, as thousands of small blocks may, nothing else is measured.
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
    """Stages over all blocks, and their cost."""

    cost: float
    assignments: list[Assignment]


@dataclass(frozen=True)
class _Links:
    """The costs to cross each cut: `costs[0]` between targets of one host, `costs[1]` between hosts.

    `far[k, l]` is 1 if the targets k and l are on different hosts, otherwise 0.
    """

    costs: Floats
    far: npt.NDArray[np.int_]


@dataclass(frozen=True)
class _Step:
    """The cheapest chains of a number of stages, by the last stage's target and the block that it ends before.

    `cost`: the chain's. `start`: the first block of the last stage. `before`: the target of the stage before it.
    """

    cost: Floats
    start: npt.NDArray[np.int_]
    before: npt.NDArray[np.int_]


def _search(loads: Floats, combine: Callable[[Floats, Floats], Floats], links: _Links) -> dict[int, _Chain]:
    """The cheapest chain for each number of stages. `combine` combines the costs of its stages and links.

    `loads[k, i, j]` is the cost of the blocks from i to before j on target k. Numbers of stages without a chain of
    finite cost are left out.
    """
    targets, count, _ = loads.shape
    nothing = np.zeros((targets, count + 1), dtype=int)
    steps = [_Step(loads[:, 0], nothing, nothing)]
    while len(steps) < targets:
        steps.append(_add_stage(steps, loads, combine, links))
    last = [int(np.argmin(step.cost[:, count])) for step in steps]
    return {
        number + 1: _Chain(float(step.cost[target, count]), _trace(steps[: number + 1], target, count))
        for number, (step, target) in enumerate(zip(steps, last, strict=True))
        if np.isfinite(step.cost[target, count])
    }


def _add_stage(
    steps: Sequence[_Step], loads: Floats, combine: Callable[[Floats, Floats], Floats], links: _Links
) -> _Step:
    """The cheapest chains with one stage more than the last of these steps."""
    targets, count, _ = loads.shape
    shorter, least = steps[-1].cost[:, :count], len(steps)
    cost = np.full((targets, count + 1), np.inf)
    start, before = (np.zeros((targets, count + 1), dtype=int) for _ in range(2))
    for target in range(least, targets):  # as many stages come before it as there are steps
        reached = combine(shorter[:target], links.costs[links.far[target, :target]])
        # For each first block of the new stage, the best target of the previous stage. Then the best first block.
        nearest = reached.argmin(axis=0)
        chains = combine(reached.min(axis=0)[:, None], loads[target])
        start[target] = chains.argmin(axis=0)
        cost[target] = chains.min(axis=0)
        before[target] = nearest[start[target]]
    return _Step(cost, start, before)


def _trace(steps: Sequence[_Step], target: int, end: int) -> list[Assignment]:
    """The stages of the last step's chain that ends on this target before block `end`."""
    chain: list[Assignment] = []
    for step in reversed(steps):
        start = int(step.start[target, end])
        chain.append(Assignment(target, start, end))
        target, end = int(step.before[target, end]), start
    return chain[::-1]


def _most_even(costs: StageCosts, loads: Floats, links: _Links, uneven: Floats, slowest: float) -> dict[int, _Chain]:
    """For each number of stages, the chain with the fewest bytes cut and the most evenly spread weights.

    It minimizes bytes cut + the sum of squares of the stages' weight bytes / all weight bytes. The second term is least
    if all stages hold the same. No stage or link is slower than `slowest`.
    """
    cut_bytes = np.array([0.0] + [costs.cut(number) for number in range(1, len(costs.names))])
    fast_enough = np.where(loads <= slowest, uneven, np.inf)
    return _search(fast_enough, np.add, replace(links, costs=np.where(links.costs <= slowest, cut_bytes, np.inf)))


def _unevenness(costs: StageCosts) -> Floats:
    """For each first block and end, the square of the stage's weight bytes / all weight bytes."""
    count = len(costs.names)
    held = [[costs.weights(i, j) if j > i else 0 for j in range(count + 1)] for i in range(count)]
    return np.array(held, dtype=float) ** 2 / max(1, costs.weights(0, count))


def explain_misfit(costs: StageCosts, targets: Sequence[Target]) -> str:
    """A message with the needed and available bytes, and what each device holds if devices are filled in order."""
    start, count = 0, len(costs.names)
    lines = []
    for target in targets:
        end = _filled(costs, target, start)
        held = f"{costs.names[start]} to {costs.names[end - 1]}" if end > start else "no block"
        size = format_bytes(target.engines + (costs.exact(start, end) if end > start else 0))
        itself = f", {format_bytes(target.engines)} of it for the engine itself" if target.engines else ""
        lines.append(f"  {target.device} holds {held}: {size} of {format_bytes(target.budget)}{itself}")
        start = end
    needed, available = costs.exact(0, count), sum(max(0, target.capacity or 0) for target in targets)
    if start < count:
        first, rest = costs.exact(start, start + 1), costs.exact(start, count)
        lines.append(f"  The first block that does not fit is {costs.names[start]}, which needs {format_bytes(first)}.")
        more = rest + max(target.engines for target in targets)
        lines.append(f"  With one more device of {format_bytes(more)}, it would fit.")
    else:
        lines.append("  It fits if devices are filled in order, but then one device gets no block: name fewer devices.")
    beside = " beside their engines" if any(target.engines for target in targets) else ""
    short = (
        f"{format_bytes(needed - available)} short"
        if needed > available
        else "but no division into consecutive blocks fits"
    )
    return (
        f"the model needs {format_bytes(needed)}, and the devices have {format_bytes(available)}{beside}, {short}:\n"
        + "\n".join(lines)
        + "\nGive the devices more memory (--memory, --headroom), add one (-d), or plan for smaller inputs (--shapes)."
    )


def _filled(costs: StageCosts, target: Target, start: int) -> int:
    """The end of the longest run of blocks from `start` that fits a target."""
    capacity, end = target.capacity, len(costs.names)
    if capacity is None:
        return end
    while end > start and (costs.memory(start, end) > capacity or costs.exact(start, end) > capacity):
        end -= 1
    return end
