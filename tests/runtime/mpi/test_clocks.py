"""Times of ranks on other machines, by the caller's clock."""

from __future__ import annotations

import pytest

from splitc.runtime.mpi.wire import RECENT, Clocks
from splitc.runtime.processes.messages import Answer


def answer(end: float) -> Answer:
    return Answer(0, None, end - 2.0, end, ((0, end - 2.0, end - 1.0),), False, None)


def test_times_of_the_same_machine_stay() -> None:
    clocks = Clocks([0, 0, 1])
    assert clocks.by_ours(1, answer(10.0), arrived=10.5) == answer(10.0)


def test_the_answer_that_came_soonest_says_how_far_clocks_are_apart() -> None:
    clocks = Clocks([0, 1, 1])
    assert clocks.by_ours(1, answer(1010.0), arrived=10.5) == answer(10.5)
    assert clocks.by_ours(2, answer(1020.0), arrived=20.1).end == pytest.approx(20.1), "of one machine"
    late = clocks.by_ours(1, answer(1030.0), arrived=35.0)
    assert (late.start, late.end) == pytest.approx((28.1, 30.1))
    assert late.spans[0][1:] == pytest.approx((28.1, 29.1))


def test_clocks_that_drift_are_followed() -> None:
    clocks = Clocks([0, 1])
    clocks.by_ours(1, answer(1000.0), arrived=0.0)
    for _ in range(RECENT):
        moved = clocks.by_ours(1, answer(1000.0), arrived=0.5)
    assert moved.end == pytest.approx(0.5)
