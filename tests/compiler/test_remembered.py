"""Results remembered for an object are dropped with it."""

from __future__ import annotations

import gc
import weakref
from pathlib import Path

from splitc.compiler import Request, plan_model
from splitc.compiler.remembered import remembered


class Thing:
    """Something to find out about."""


def test_each_question_is_answered_once() -> None:
    asked: list[tuple[Thing, int]] = []

    @remembered
    def ask(thing: Thing, number: int) -> int:
        asked.append((thing, number))
        return number

    one, other = Thing(), Thing()
    assert [ask(one, 1), ask(one, 1), ask(one, 2), ask(other, 1)] == [1, 1, 2, 1]
    assert asked == [(one, 1), (one, 2), (other, 1)]


def test_nothing_of_a_plan_stays(new_decoder: Path) -> None:
    analysis = weakref.ref(plan_model(new_decoder, ["2xcpu"], Request(memory=["1GiB"], tensor_split=[1, 1])).analysis)
    gc.collect()
    assert analysis() is None
