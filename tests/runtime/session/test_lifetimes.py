"""Sessions and sequences that are dropped, forked, left open, or closed at odd moments."""

from __future__ import annotations

import asyncio
import copy
import gc
import os
import pickle
import signal
import subprocess
import sys
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import psutil
import pytest

from splitc.runtime import Session
from splitc.runtime.errors import MisuseError
from splitc.runtime.processes.ranks import RankProcesses
from splitc.runtime.ranks import workers
from splitc.runtime.ranks.thread import Worker
from tests.conftest import decoder_feeds, until
from tests.helpers.packages import compile_mode
from tests.helpers.workers import workers_of

# Children are counted.
pytestmark = pytest.mark.usefixtures("children_of_sessions")

KINDS = ["threads", "processes"]


@pytest.fixture
def package(decoder: Path) -> Path:
    """A package of two stages."""
    return compile_mode(decoder, "layer")


@pytest.fixture(params=KINDS)
def open_session(request: pytest.FixtureRequest, package: Path) -> Callable[[], Session]:
    return lambda: Session(package, verify="never", threads=1, ranks=request.param)


def ours() -> tuple[int, int]:
    """The threads and children of this process."""
    return threading.active_count(), len(psutil.Process().children())


def test_dropped_sessions_are_closed(open_session: Callable[[], Session]) -> None:
    before = ours()
    for _ in range(2):
        session = open_session()
        session.run(decoder_feeds())
        sequence = session.start()
        known = weakref.ref(session)
        del session, sequence
        gc.collect()
        assert known() is None
    until(lambda: all(now <= was for now, was in zip(ours(), before, strict=True)))


def test_dropped_sequences_free_their_states(package: Path) -> None:
    with Session(package, verify="never", threads=1, ranks="threads") as session:
        held = workers_of(session)[0].computation.sequences
        feeds = {name: array for name, array in decoder_feeds().items() if not name.startswith("past")}
        feeds["attention_mask"] = feeds["attention_mask"][:, -feeds["input_ids"].shape[1] :]
        for _ in range(5):
            session.start().run(feeds)
            gc.collect()
        session.run(decoder_feeds())
        until(lambda: len([number for number in held if number is not None]) == 0)


def test_last_reference_may_be_a_requests(open_session: Callable[[], Session], monkeypatch: pytest.MonkeyPatch) -> None:
    """Then a rank closes the session, and does not wait for itself."""
    lost: list[Any] = []
    monkeypatch.setattr(sys, "unraisablehook", lost.append)
    before = ours()
    for _ in range(3):
        session = open_session()
        future = session.submit(decoder_feeds())
        del session
        future.result(20)
    until(lambda: all(now <= was for now, was in zip(ours(), before, strict=True)))
    assert lost == []


@pytest.mark.parametrize("error", [ValueError, SystemExit, KeyboardInterrupt])
def test_what_a_callback_raises_ends_nothing(
    open_session: Callable[[], Session], error: type[BaseException], caplog: pytest.LogCaptureFixture
) -> None:
    def back(_: Future[Any]) -> None:
        called.append(error)
        raise error

    called: list[type[BaseException]] = []
    with open_session() as session:
        for count in (1, 2, 3):
            session.submit(decoder_feeds()).add_done_callback(back)
            until(lambda expected=count: len(called) == expected)  # type: ignore[misc]
        session.submit(decoder_feeds()).result(20)
        assert asyncio.run(session.run_async(decoder_feeds())).keys() == session.run(decoder_feeds()).keys()
    # Python prints what this logger is given, unless the program says otherwise.
    assert [record.name for record in caplog.records if "exception calling callback" in record.message] == [
        "concurrent.futures"
    ] * 3


@pytest.mark.parametrize("ranks", KINDS)
def test_python_ends_with_an_open_session(package: Path, ranks: str) -> None:
    """And with requests in flight."""
    program = (
        "import sys, numpy as np\n"
        "from splitc.runtime import Session\n"
        f"session = Session({str(package)!r}, verify='never', threads=1, ranks={ranks!r})\n"
        "feeds = {t.name: np.ones(t.sample_shape, t.dtype) for t in session.inputs}\n"
        "futures = [session.submit(feeds) for _ in range(4)]\n"
        "print('leaving')\n"
    )
    found = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert (found.returncode, found.stdout, found.stderr) == (0, "leaving\n", "")


@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy, pickle.dumps])
def test_session_is_not_copied_nor_sent(copied: Callable[[Session], object], package: Path) -> None:
    with Session(package) as session:
        with pytest.raises(MisuseError, match="a session can't be copied, or sent to another process: open one there"):
            copied(session)
        assert session.run(decoder_feeds())


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork")
def test_copies_of_the_process_have_no_session(open_session: Callable[[], Session]) -> None:
    with open_session() as session, session.start() as sequence:
        child = os.fork()
        if child == 0:
            code = 1
            try:
                session.run(decoder_feeds())
            except Exception as error:
                code = 0 if "a forked process can't use the session" in str(error) else 2
            sequence.close()
            session.close()
            os._exit(code)
        deadline = time.monotonic() + 20
        while (ended := os.waitpid(child, os.WNOHANG))[0] == 0:
            assert time.monotonic() < deadline, "the copy hangs"
            time.sleep(0.01)
        assert os.waitstatus_to_exitcode(ended[1]) == 0
        session.run(decoder_feeds())


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork")
@pytest.mark.usefixtures("plain_ranks")  # a copy can't fork them
def test_copies_of_the_process_have_sessions_of_their_own(package: Path) -> None:
    """They take no answers of the first process."""
    with Session(package, verify="never", threads=1, ranks="processes") as session:
        session.run(decoder_feeds())
        child = os.fork()
        if child == 0:
            code = 1
            with Session(package, verify="never", threads=1, ranks="processes") as own:
                own.run(decoder_feeds())
                time.sleep(0.7)  # it looks after its ranks meanwhile
                code = 0
            os._exit(code)
        while (ended := os.waitpid(child, os.WNOHANG))[0] == 0:
            session.submit(decoder_feeds()).result(10)
            time.sleep(0.01)
        assert os.waitstatus_to_exitcode(ended[1]) == 0


def test_callbacks_may_submit_and_close_but_not_wait(open_session: Callable[[], Session]) -> None:
    """Callbacks may submit requests and close the session, and get an error if they wait for it."""
    results: list[Any] = []

    def call(what: Callable[[], Any]) -> Any:
        called = threading.Event()

        def back(_: Future[Any]) -> None:
            try:
                results.append(what())
            except Exception as error:
                results.append(error)
            called.set()

        session.submit(decoder_feeds()).add_done_callback(back)
        assert called.wait(20)
        return results[-1]

    with open_session() as session:
        session.run(decoder_feeds())
        for _ in range(3):  # a callback that is added too late is called by this thread, which may wait
            found = call(lambda: session.run(decoder_feeds()))
            assert isinstance(found, (MisuseError, dict)), found
        begin = {name: feed for name, feed in decoder_feeds(1, 4, 0).items() if not name.startswith("past")}
        with session.start() as sequence:
            call(lambda: sequence.run(begin))
            assert sequence.usable, "it was refused, so nothing ran"
        assert call(lambda: session.submit(decoder_feeds())).result(20).keys() >= {"logits"}
        assert call(session.close) is None
        until(lambda: have_ended(session._workers))


def have_ended(ranks: Any) -> bool:
    if isinstance(ranks, RankProcesses):
        return all(process._process.poll() is not None for process in ranks._processes)
    return not ranks._workers


@pytest.mark.parametrize(("number", "raised"), [(signal.SIGINT, KeyboardInterrupt), (signal.SIGTERM, SystemExit)])
def test_signal_while_ranks_start_leaves_no_thread(
    package: Path, monkeypatch: pytest.MonkeyPatch, number: signal.Signals, raised: type[BaseException]
) -> None:
    """It is held back until all have started: a thread in mid-start could not be ended."""
    started: list[Worker] = []
    start = Worker.start

    def interrupted(worker: Worker) -> None:
        os.kill(os.getpid(), number)
        start(worker)
        started.append(worker)

    monkeypatch.setattr(Worker, "start", interrupted)
    before = signal.signal(number, handler_that_raises(raised))
    try:
        with pytest.raises(raised):
            Session(package, threads=1, ranks="threads")
    finally:
        signal.signal(number, before)
    assert len(started) == 2
    assert not any(worker.is_alive() for worker in started)


def handler_that_raises(raised: type[BaseException]) -> Callable[..., None]:
    def handle(*_: object) -> None:
        raise raised

    return handle


def test_interrupt_while_ranks_load_leaves_no_thread(package: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Python ends the process hard if a thread is inside an engine at exit."""

    def interrupted(futures: object, what: str) -> None:
        raise KeyboardInterrupt

    before = set(threading.enumerate())
    monkeypatch.setattr(workers, "first_error", interrupted)
    with pytest.raises(KeyboardInterrupt):
        Session(package)
    assert set(threading.enumerate()) <= before


def test_dropped_sequence_may_be_taken_by_another_thread(package: Path) -> None:
    """If two threads see the same one, the second must not fail with an IndexError."""

    class Taken(deque[int]):
        def popleft(self) -> int:
            super().popleft()
            raise IndexError("pop from an empty deque")

    with Session(package, verify="never", threads=1, ranks="threads") as session:
        session._dropped = Taken([5])
        assert session.run(decoder_feeds()).keys() >= {"logits"}
