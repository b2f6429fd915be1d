"""Reductions between threads: the same bits on all ranks each time, and failures reach every rank."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from splitc.runtime.collectives.collectives import Collectives
from splitc.runtime.collectives.threads import Hub, connect
from splitc.runtime.engines.onnxruntime_cpu import OnnxRuntimeBackend
from splitc.runtime.errors import HandOverError
from splitc.runtime.package.steps import Reduce, Run
from splitc.runtime.ranks.loop import Program, execute
from splitc.runtime.threads.failures import Failure
from splitc.runtime.threads.futures import Executor
from tests.helpers.engines import FunctionEngine, fail

RANKS = 4


def together(work: Callable[[int, Collectives], Any], ranks: int = RANKS) -> list[Any]:
    """The results of `work` on each rank, in a thread each."""
    results: list[Any] = [None] * ranks
    backends = [OnnxRuntimeBackend(1) for _ in range(ranks)]

    def run(rank: int, ends: Collectives) -> None:
        try:
            results[rank] = work(rank, ends)
        except Exception as error:
            results[rank] = error

    threads = [threading.Thread(target=run, args=pair) for pair in enumerate(connect(Hub(ranks), backends))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=20)
        assert not thread.is_alive()
    return results


@pytest.mark.parametrize(("operation", "function"), [("sum", np.sum), ("max", np.max)])
def test_all_ranks_get_the_same(operation: str, function: Any) -> None:
    backend = OnnxRuntimeBackend(1)
    arrays = np.random.default_rng(0).standard_normal((RANKS, 3, 1000)).astype(np.float32)
    step = Reduce(operation, ["a", "b"], ["A", "B"], list(range(RANKS)))

    def work(rank: int, ends: Collectives) -> Any:
        for _ in range(50):
            parts = [backend.upload(arrays[rank].copy()), backend.upload(arrays[rank, :1].copy())]
            wholes = ends.all_reduce(step, parts)
        return [backend.download({"": each})[""].copy() for each in wholes]

    results = together(work)
    for first, second in results:
        np.testing.assert_allclose(first, function(arrays, axis=0), rtol=1e-5, atol=1e-5)
        assert first.tobytes() == results[0][0].tobytes()
        assert second.tobytes() == results[0][1].tobytes()


def test_groups_do_not_wait_for_each_other() -> None:
    backend = OnnxRuntimeBackend(1)

    def work(rank: int, ends: Collectives) -> float:
        group = [0, 1] if rank < 2 else [2, 3]
        for _ in range(20 if rank < 2 else 3):
            parts = [backend.upload(np.full(1, rank, np.float32))]
            (whole,) = ends.all_reduce(Reduce("sum", ["a"], ["A"], group), parts)
        return float(backend.download({"": whole})[""][0])

    assert together(work) == [1.0, 1.0, 5.0, 5.0]


def test_rank_that_fails_does_not_leave_the_others_waiting() -> None:
    backend = OnnxRuntimeBackend(1)
    step = Reduce("sum", ["a"], ["A"], list(range(RANKS)))

    def part(x: np.ndarray[Any, Any]) -> Any:
        return backend.upload(x.copy())

    def work(rank: int, ends: Collectives) -> Any:
        outcomes: list[float | str] = []
        for attempt in range(3):
            engine = FunctionEngine(["x"], "a", fail if rank == 2 and attempt == 1 else part)
            program = Program([Run(0), step], [engine], ["A"])
            try:
                values, _ = execute(program, ends, lambda: {"x": np.ones(1, np.float32)})
                outcomes.append(float(backend.download(values)["A"][0]))
            except ValueError as error:
                outcomes.append(str(error))
        return outcomes

    assert together(work) == [[4.0, "out of memory", 4.0]] * RANKS


def test_all_gather_gives_all_what_each_handed_in() -> None:
    def work(rank: int, ends: Collectives) -> Any:
        return [ends.all_gather(range(RANKS), (rank, turn)) for turn in range(20)]

    assert together(work) == [[[(rank, turn) for rank in range(RANKS)] for turn in range(20)]] * RANKS


def test_failure_that_is_handed_in_is_what_all_get() -> None:
    def work(rank: int, ends: Collectives) -> Any:
        met = ends.all_gather(range(RANKS), Failure(ValueError("no memory")) if rank == 1 else rank)
        return str(met.error)

    assert together(work) == ["no memory"] * RANKS


def test_ranks_in_different_requests_do_not_meet() -> None:
    def work(rank: int, ends: Collectives) -> Any:
        ends.begin(7 + (rank == 1))
        return ends.all_gather((0, 1), rank)

    for error in together(work, 2):
        assert isinstance(error, HandOverError) and "out of step" in str(error)


def test_sum_that_can_not_be_made_is_a_failure_of_all() -> None:
    backend, step = OnnxRuntimeBackend(1), Reduce("sum", ["a"], ["A"], list(range(RANKS)))

    def work(rank: int, ends: Collectives) -> Any:
        return type(ends.all_reduce(step, [backend.upload(np.ones(1 + rank))]).error)

    assert together(work) == [ValueError] * RANKS


def test_abort_ends_waits_now_and_later() -> None:
    hub = Hub(2)
    first, second = connect(hub, [OnnxRuntimeBackend(1)] * 2)
    waiting = Executor(1).submit(lambda: first.receive(1, "x"))
    hub.abort(ValueError("closed"))
    second.send(0, "x", OnnxRuntimeBackend(1).upload(np.ones(1)))  # which is not given up, and comes too late
    for failure in (waiting.result(10), first.receive(1, "x"), second.all_gather((0, 1), None)):
        assert isinstance(failure, Failure) and str(failure.error) == "closed"
