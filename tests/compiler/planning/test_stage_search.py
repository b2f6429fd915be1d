"""The search against brute force, and its message if nothing fits."""

from __future__ import annotations

import itertools
import math
import random
import time
from collections.abc import Iterator, Sequence

import pytest

from splitc.compiler.errors import CannotSplitError
from splitc.compiler.planning.stage_search import Assignment, StageCosts, Target, plan_stages
from splitc.runtime.errors import DoesNotFitError


def make_costs(
    loads: Sequence[float],
    sizes: Sequence[int],
    cuts: Sequence[int],
    bandwidth: float = math.inf,
    known: float = 1.0,
) -> StageCosts:
    """Costs of blocks that add up. The bound of their memory is the fraction `known` of the exact bytes."""
    return StageCosts(
        names=[f"b{index}" for index in range(len(loads))],
        loads=[lambda start, end: sum(loads[start:end])],
        weights=lambda start, end: sum(sizes[start:end]),
        memory=lambda start, end: int(known * sum(sizes[start:end])),
        exact=lambda start, end: sum(sizes[start:end]),
        cut=lambda number: cuts[number],
        link=lambda count, far: count / bandwidth * (3 if far else 1),
    )


def every_chain(blocks: int, targets: int) -> Iterator[list[Assignment]]:
    """All ways to put consecutive blocks on some of the targets, in order."""
    for used in range(1, min(blocks, targets) + 1):
        for chosen in itertools.combinations(range(targets), used):
            for cuts in itertools.combinations(range(1, blocks), used - 1):
                bounds = [0, *cuts, blocks]
                yield [Assignment(k, i, j) for k, i, j in zip(chosen, bounds, bounds[1:])]


def cost(chain: Sequence[Assignment], costs: StageCosts, targets: Sequence[Target], objective: str) -> float:
    times = []
    for before, each in zip((chain[0], *chain), chain):
        target = targets[each.target]
        if target.budget is not None and costs.exact(each.start, each.end) > target.budget:
            return math.inf
        times.append(costs.loads[target.load](each.start, each.end) / target.speed)
        if each.start:
            times.append(costs.link(costs.cut(each.start), target.host != targets[before.target].host))
    return max(times) if objective == "throughput" else sum(times)


@pytest.mark.parametrize("objective", ["throughput", "latency"])
@pytest.mark.parametrize("spread", [False, True])
@pytest.mark.parametrize("seed", range(25))
def test_optimum_is_that_of_brute_force(objective: str, spread: bool, seed: int) -> None:
    chance = random.Random(seed)
    blocks, devices = chance.randint(3, 7), chance.randint(1, 3)
    costs = make_costs(
        [chance.randint(1, 9) for _ in range(blocks)],
        [chance.randint(1, 9) for _ in range(blocks)],
        [chance.randint(0, 20) for _ in range(blocks)],
        bandwidth=chance.choice([math.inf, 2.0]),
        known=chance.choice([1.0, 0.5]),
    )
    targets = [
        Target(f"d{k}", chance.choice([0.5, 1.0, 2.0]), chance.choice([None, 12, 25, 40]), host=chance.choice([0, 1]))
        for k in range(devices)
    ]
    chains = [chain for chain in every_chain(blocks, devices) if not spread or len(chain) == devices]
    best = min(cost(chain, costs, targets, objective) for chain in chains)
    if best == math.inf:
        with pytest.raises(DoesNotFitError):
            plan_stages(costs, targets, objective=objective, spread=spread)
        return
    found = plan_stages(costs, targets, objective=objective, spread=spread)
    assert cost(found, costs, targets, objective) == pytest.approx(best)
    assert found in chains


def test_fewest_devices_when_more_would_not_help() -> None:
    costs = make_costs([4, 1, 8], [1, 1, 1], [0, 5, 5])
    targets = [Target(f"d{k}", 1.0, None) for k in range(3)]
    # The block of 8 is the bottleneck: two stages are as fast as three.
    assert len(plan_stages(costs, targets)) == 2
    assert len(plan_stages(costs, targets, spread=True)) == 3
    assert len(plan_stages(costs, targets, objective="latency")) == 1


def test_equal_plans_are_decided_by_bytes_cut_and_then_evenness() -> None:
    targets = [Target(f"d{k}", 1.0, None) for k in range(2)]
    assert plan_stages(make_costs([2, 1, 1, 2], [1] * 4, [0, 9, 9, 9]), targets)[0].end == 2
    assert plan_stages(make_costs([4, 1, 1, 1, 1], [1] * 5, [0, 9, 9, 2, 9]), targets)[0].end == 1
    # The last block is the bottleneck, so the others may be cut anywhere: evenly, then.
    three = [Target(f"d{k}", 1.0, None) for k in range(3)]
    chosen = plan_stages(make_costs([1, 1, 1, 1, 9], [1] * 5, [0, 1, 1, 1, 1]), three, spread=True)
    assert [each.end for each in chosen] == [2, 4, 5]


def test_stages_are_even_where_it_costs_no_latency() -> None:
    targets = [Target(f"d{k}", 1.0, None) for k in range(2)]
    chosen = plan_stages(make_costs([1] * 6, [1] * 6, [0] * 6), targets, objective="latency", spread=True)
    assert [each.end for each in chosen] == [3, 6]


def test_faster_device_gets_more() -> None:
    costs = make_costs([1] * 8, [1] * 8, [0] * 8)
    chosen = plan_stages(costs, [Target("slow", 1.0, None), Target("fast", 3.0, None)])
    assert [each.end for each in chosen] == [2, 8]


def test_more_devices_than_blocks() -> None:
    targets = [Target(f"d{k}", 1.0, None) for k in range(4)]
    with pytest.raises(CannotSplitError, match="4 devices, and the model can be cut into 3 pieces at most"):
        plan_stages(make_costs([1] * 3, [1] * 3, [0] * 3), targets)


def test_misfit_is_accounted_for() -> None:
    targets = [Target("cpu0", 1.0, 3 << 20), Target("cpu1", 1.0, 2 << 20)]
    with pytest.raises(DoesNotFitError) as caught:
        plan_stages(make_costs([1] * 4, [2 << 20] * 4, [0] * 4), targets)
    message = str(caught.value)
    assert "the model needs 8.00 MiB, and the devices have 5.00 MiB, 3.00 MiB short" in message
    assert "cpu0 holds b0 to b0: 2.00 MiB of 3.00 MiB" in message
    assert "The first block that does not fit is b2, which needs 2.00 MiB." in message
    assert "With one more device of 4.00 MiB, it would fit." in message


def test_hundred_blocks_on_sixteen_devices_are_quick() -> None:
    chance = random.Random(1)
    costs = make_costs(
        [chance.random() for _ in range(100)], [chance.randint(1, 9) for _ in range(100)], [7] * 100, bandwidth=1e3
    )
    start = time.perf_counter()
    plan_stages(costs, [Target(f"d{k}", 1.0, 80) for k in range(16)])
    # Far from the measured time (about 0.1 s): this finds a search that is no longer polynomial, not a slow machine.
    assert time.perf_counter() - start < 10


def test_what_fits_by_the_bound_alone_is_not_planned() -> None:
    """The bound of 4 blocks is 8 bytes, and they hold 16; the budgets count what the engines take, 2 bytes of 12."""
    costs = make_costs([1] * 4, [4] * 4, [0] * 4, known=0.5)
    targets = [Target(f"d{k}", 1.0, 12, engines=2) for k in range(2)]
    assert [(each.start, each.end) for each in plan_stages(costs, targets)] == [(0, 2), (2, 4)]
    with pytest.raises(DoesNotFitError, match=r"needs 16 B, and the devices have 10 B beside their engines, 6 B"):
        plan_stages(costs, targets[:1])


def test_room_for_all_that_has_none_for_any_run_of_blocks() -> None:
    targets = [Target(f"d{k}", 1.0, 3) for k in range(2)]
    with pytest.raises(DoesNotFitError, match="the devices have 6 B, but no division into consecutive blocks fits:"):
        plan_stages(make_costs([1] * 3, [2] * 3, [0] * 3), targets)
