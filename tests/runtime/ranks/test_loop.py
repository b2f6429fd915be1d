"""The loop that runs a rank's steps, with fake engines."""

from __future__ import annotations

import weakref
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pytest

from splitc.runtime.collectives.collectives import Collectives
from splitc.runtime.collectives.threads import Hub, connect
from splitc.runtime.errors import EngineError, HandOverError
from splitc.runtime.package.steps import Receive, Reduce, Run, Send, Step
from splitc.runtime.ranks.loop import Program, execute
from splitc.runtime.threads.failures import Failure, attempt
from tests.helpers.engines import FunctionEngine, fail


def connected(ranks: int) -> Sequence[Collectives]:
    """The ends of ranks whose values are any objects."""

    class Passing:
        def download(self, values: Mapping[str, Any]) -> Mapping[str, Any]:
            return values

        def upload(self, value: Any) -> Any:
            return value

    return connect(Hub(ranks), [Passing()] * ranks)  # type: ignore[list-item]


def test_value_is_received_computed_and_sent() -> None:
    first, middle, last = connected(3)
    first.send(1, "x", 20)
    steps: list[Step] = [Receive("x", 0), Run(0), Send("y", 2)]
    values, spans = execute(
        Program(steps, [FunctionEngine(["x", "w"], "y", lambda x, w: x + w)], ["y"]),
        middle,
        lambda: {"w": 1},
    )
    assert last.receive(1, "y") == 21
    assert values["y"] == 21
    assert [span.step for span in spans] == steps
    assert all(span.start <= span.end for span in spans)


def test_value_is_let_go_after_its_last_use() -> None:
    first, second = connected(2)
    first.send(1, "x", 1)
    engines = [FunctionEngine(["x"], "y", lambda x: x), FunctionEngine(["y"], "z", lambda y: y)]
    values, _ = execute(Program([Receive("x", 0), Run(0), Run(1)], engines, ["z"]), second, dict)
    assert values == {"z": 1}


def test_failure_reaches_those_who_wait_and_leaves_the_channels_clean() -> None:
    first, middle, last = connected(3)
    steps: list[Step] = [Receive("a", 0), Run(0), Send("b", 2), Receive("c", 0), Send("d", 2)]
    for value in (1, 2):
        first.send(1, "a", value)
        first.send(1, "c", value)
    with pytest.raises(ValueError, match="out of memory"):
        execute(Program(steps, [FunctionEngine(["a"], "b", fail)]), middle, lambda: {"d": 0})
    assert isinstance(last.receive(1, "b"), Failure)
    assert isinstance(last.receive(1, "d"), Failure)
    execute(Program(steps, [FunctionEngine(["a"], "b", lambda a: a)]), middle, lambda: {"d": 0})
    assert last.receive(1, "b") == 2


def test_received_failure_is_raised_and_handed_on() -> None:
    first, middle, last = connected(3)
    first.send(1, "a", Failure(ValueError("stage 0")))
    engine = FunctionEngine(["a"], "b", fail)
    with pytest.raises(ValueError, match="stage 0"):
        execute(Program([Receive("a", 0), Run(0), Send("b", 2)], [engine]), middle, dict)
    assert isinstance(last.receive(1, "b"), Failure)


def test_sum_that_fails_on_one_rank_leaves_nobody_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    """It has no memory for the result, which the others have: they go on, and wait for its next value."""
    first, second = connected(2)
    monkeypatch.setattr(second, "all_reduce", fail)
    steps: list[Step] = [Reduce("sum", ["x"], ["y"], [0, 1]), Send("y", 0)]
    with pytest.raises(ValueError, match="out of memory"):
        execute(Program(steps, []), second, lambda: {"x": [1]})
    assert isinstance(first.receive(1, "y"), Failure)


@pytest.mark.parametrize(("sent", "wanted"), [((3, "x"), (3, "y")), ((3, "x"), (4, "x"))])
def test_value_of_another_request_or_name_is_not_for_the_request_to_fail_alone(sent: Any, wanted: Any) -> None:
    first, second = connected(2)
    first.begin(sent[0])
    second.begin(wanted[0])
    first.send(1, sent[1], 1)
    program = Program([Receive(wanted[1], 0)], [], [])
    message = f"rank 1 waits for '{wanted[1]}' of request {wanted[0]} from rank 0, which sent 'x' of request 3"
    with pytest.raises(HandOverError, match=message):
        attempt(lambda: execute(program, second, dict))


def test_failure_before_the_first_step_is_one_of_the_request_too() -> None:
    first, middle, last = connected(3)
    first.send(1, "a", 1)
    steps: list[Step] = [Receive("a", 0), Run(0), Send("b", 2)]
    with pytest.raises(ValueError, match="out of memory"):
        execute(Program(steps, [FunctionEngine(["a"], "b", lambda a: a)]), middle, fail)
    assert isinstance(last.receive(1, "b"), Failure)


def test_failure_keeps_nothing_of_where_it_came_from() -> None:
    """The error may be kept anywhere, so its frames must not keep a device's memory alive."""
    held = []

    def engine() -> None:
        memory = np.zeros(1)
        held.append(weakref.ref(memory))
        raise ValueError

    def run() -> None:
        memory = np.zeros(1)
        held.append(weakref.ref(memory))
        try:
            engine()
        except ValueError as error:
            raise EngineError("the engine failed") from error

    failure = attempt(run)
    assert isinstance(failure.error, EngineError)
    assert [each() for each in held] == [None, None]
