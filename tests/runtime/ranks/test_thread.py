"""The thread of a rank."""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Callable
from functools import partial
from pathlib import Path
from queue import SimpleQueue
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from splitc.runtime import Session
from splitc.runtime.collectives.threads import Hub, connect
from splitc.runtime.errors import EngineError
from splitc.runtime.ranks import thread
from splitc.runtime.ranks.computation import Ran
from splitc.runtime.ranks.loaded import LoadedRank
from splitc.runtime.ranks.loop import Program
from splitc.runtime.ranks.request import InFlightRequest
from tests.helpers.fake_gpu_sessions import package
from tests.helpers.fake_gpus import FakeBackend, HostEngine
from tests.helpers.meetings import meet


def backend_of(told: Callable[[str], None] = lambda what: None) -> Any:
    """A backend of a GPU that does nothing. It tells when requests begin and end."""
    begins = {"begin_request": partial(told, "begin"), "end_request": partial(told, "end")}
    nothing = dict.fromkeys(("attach", "detach"), lambda: None)
    return SimpleNamespace(asynchronous=True, notes=[], **nothing, **begins)


@pytest.mark.usefixtures("gpus")
def test_a_rank_that_fails_to_load_leaves_its_gpu(decoder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Work that it began there ends before its engines are freed, for which the error's receiver does not wait."""
    engines: list[weakref.ref[HostEngine]] = []
    left: list[tuple[str, bool]] = []
    load, detach = FakeBackend.load, FakeBackend.detach

    def seen_load(self: FakeBackend, *args: Any) -> HostEngine:
        engine = load(self, *args)
        engines.append(weakref.ref(engine))
        return engine

    def fail(self: FakeBackend, size: int) -> None:
        raise EngineError("the GPU has no room")

    def seen_detach(self: FakeBackend) -> None:
        left.append((threading.current_thread().name, engines[0]() is not None))
        detach(self)

    monkeypatch.setattr(FakeBackend, "load", seen_load)
    monkeypatch.setattr(FakeBackend, "reserve", fail)
    monkeypatch.setattr(FakeBackend, "detach", seen_detach)
    with pytest.raises(EngineError, match="the GPU has no room"):
        Session(package(decoder, "layer", 1), devices=["cuda0"])
    assert left == [("splitc rank 0 (cpu0)", True)]  # named after the device that was planned for
    assert [engine() for engine in engines] == [None]


@pytest.mark.usefixtures("gpus")
def test_what_is_reserved_is_what_was_planned(decoder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A cache counts as two arrays, unless it is always written in place."""
    reserved: list[int] = []
    monkeypatch.setattr(FakeBackend, "reserve", lambda _, size: reserved.append(size))
    with Session(package(decoder, "layer", 1), devices=["cuda0"]) as session:
        (rank,) = session.manifest.ranks
    assert reserved == [(rank.passed_bytes or 0) + rank.cache_bytes]


def test_failing_request_is_given_up_before_the_next_one_begins(monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise the other rank would wait for outputs of earlier requests, or sum values of the next one."""
    mine, other = meet(2, patience=5)
    came = threading.Event()
    errors: list[BaseException] = []

    class SlowComputation:
        def __init__(self, *_: Any) -> None:
            self.sequences: dict[int, Any] = {}
            self.adapters: dict[int, Any] = {}

        def run(self, request: InFlightRequest) -> Ran:
            if request.number == 1:
                raise EngineError("there is no memory for this one")
            return lambda: (came.wait(20), {})[1], [], False

    monkeypatch.setattr(thread, "load_rank", lambda *_: LoadedRank(Program([], []), [mine], None, None, None))
    monkeypatch.setattr(thread, "Computation", SlowComputation)
    setup: Any = SimpleNamespace(number=0, rank=SimpleNamespace(device="cuda0"))
    backend = backend_of()
    worker = thread.Worker(setup, backend, connect(Hub(1), [backend])[0], errors.append)
    worker.start()
    for number in range(3):
        worker.requests.put(InFlightRequest({}, number=number))
    other.begin(1)
    array = np.ones(4, np.float32)
    assert other.all_reduce(0, 1, array.ctypes.data, array.ctypes.data, 4) == 1  # another rank failed
    assert not came.is_set()
    came.set()
    worker.requests.put(None)
    worker.join(20)
    assert errors == []


def test_answer_that_can_not_be_given_breaks_the_session(monkeypatch: pytest.MonkeyPatch) -> None:
    """On an asynchronous device another thread answers: its error must reach the caller."""
    computation = SimpleNamespace(sequences={}, adapters={}, run=lambda _: (dict, [], False))
    monkeypatch.setattr(thread, "load_rank", lambda *_: LoadedRank(Program([], []), [], None, None, None))
    monkeypatch.setattr(thread, "Computation", lambda *_: computation)
    setup: Any = SimpleNamespace(number=0, rank=SimpleNamespace(device="cuda0"))
    backend = backend_of()
    broken = SimpleQueue[BaseException]()

    def full(_: InFlightRequest) -> None:
        raise OSError("Too many open files")

    worker = thread.Worker(setup, backend, connect(Hub(1), [backend])[0], broken.put)
    worker.start()
    worker.requests.put(InFlightRequest({}, done=full))
    assert "Too many open files" in str(broken.get(timeout=20))
    worker.requests.put(None)
    worker.join(20)


def test_requests_are_answered_in_order_though_a_replay_fails_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """The session takes an early answer for one of a rank that missed requests."""
    came, answered = threading.Event(), SimpleQueue[int]()

    def play(request: InFlightRequest, _: Any) -> None:
        if request.number == 1:
            came.set()
            raise EngineError("there is no memory for its states")

    def wait() -> dict[str, Any]:
        assert came.wait(20)
        time.sleep(0.1)
        return {}

    errors: list[BaseException] = []
    computation = SimpleNamespace(sequences={}, adapters={}, run=lambda _: (wait, [], False))
    monkeypatch.setattr(thread, "load_rank", lambda *_: LoadedRank(Program([], []), [], None, None, None))
    monkeypatch.setattr(thread, "Computation", lambda *_: computation)
    monkeypatch.setattr(thread, "RankReplays", lambda *_: SimpleNamespace(play=play, clear=lambda: None))
    setup: Any = SimpleNamespace(number=0, rank=SimpleNamespace(device="cuda0"), manifest=None)
    told: list[str] = []
    backend = backend_of(told.append)
    worker = thread.Worker(setup, backend, connect(Hub(1), [backend])[0], errors.append, replays_with=())
    worker.start()
    for number in range(2):
        worker.requests.put(InFlightRequest({}, done=lambda request: answered.put(request.number), number=number))
    assert [answered.get(timeout=20) for _ in range(2)] == [0, 1]
    worker.requests.put(None)
    worker.join(20)
    assert errors == []
    assert told == ["begin", "end"] * 2
