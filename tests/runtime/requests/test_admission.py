"""Requests in flight: in order, bounded, each with its own answer; every failure ends soon."""

from __future__ import annotations

import errno
import gc
import itertools
import os
import signal
import socket
import subprocess
import sys
import textwrap
import threading
import time
import weakref
from collections.abc import Iterator
from concurrent.futures import CancelledError, Future, wait
from itertools import product
from pathlib import Path
from queue import SimpleQueue
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from splitc.compiler import compile_model, plan_model
from splitc.runtime import Session
from splitc.runtime.arrays.files import save_arrays
from splitc.runtime.engines.onnxruntime_cpu import OnnxRuntimeEngine
from splitc.runtime.errors import EngineError, FeedError, MisuseError, SplitcError
from splitc.runtime.ranks.thread import Worker
from tests.conftest import LAYER, Arrays, assert_close, decoder_feeds, listen_to_interrupts, run_whole, until
from tests.helpers.engines import hold_engines
from tests.helpers.packages import compile_mode
from tests.helpers.workers import workers_of

STREAMED = ["layer", "row", "tensor", "tensor in layers"]


@pytest.fixture(params=STREAMED)
def package_of(request: pytest.FixtureRequest, decoder: Path) -> Path:
    """A package in each split mode, and in two at once."""
    return compile_mode(decoder, request.param)


@pytest.fixture
def streamed(package_of: Path) -> Iterator[Session]:
    with Session(package_of, threads=1) as session:
        yield session


def sized(number: int) -> Arrays:
    """Feeds that differ from request to request, in size too."""
    return decoder_feeds(batch=1 + number % 3, new=1 + number % 4, past=number % 5)


def bad() -> Arrays:
    """Feeds that an engine fails on: the mask has another length than past and tokens."""
    feeds = decoder_feeds()
    feeds["attention_mask"] = feeds["attention_mask"][:, :-1]
    return feeds


def test_answers_come_in_order_and_are_each_ones_own(streamed: Session, decoder: Path) -> None:
    outputs = list(streamed.map((sized(number) for number in range(20)), in_flight=4))
    for number, found in enumerate(outputs):
        assert_close(found, run_whole(decoder, sized(number)), 2e-5)


def test_outputs_go_with_the_last_who_holds_them(streamed: Session) -> None:
    """They are freed with their last reference, not by the garbage collector, which ignores their bytes."""
    gc.collect()
    gc.disable()
    try:
        held = [*streamed.run(sized(0)).values(), *streamed.submit(sized(1)).result().values()]
        left = [weakref.ref(array) for array in held]
        held.clear()
        until(lambda: all(array() is None for array in left))
    finally:
        gc.enable()


def test_request_has_what_it_was_given_when_it_was_given(
    streamed: Session, decoder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A caller of submit, or of `map` with an iterator, may reuse its arrays for the next request."""
    gate = threading.Event()
    run = OnnxRuntimeEngine.run
    monkeypatch.setattr(OnnxRuntimeEngine, "run", lambda self, *given: (gate.wait(20), run(self, *given))[1])
    buffer = decoder_feeds()
    kept: list[Arrays] = []

    def refilled() -> Iterator[Arrays]:
        for number in range(3):
            for name, array in buffer.items():
                if name != "position_ids":
                    array[...] = (array + number) % 2
            kept.append({name: array.copy() for name, array in buffer.items()})
            yield buffer
        for array in buffer.values():
            array[...] = 0
        gate.set()

    for number, found in enumerate(streamed.map(refilled(), in_flight=4)):
        assert_close(found, run_whole(decoder, kept[number]), 2e-5)


def test_failing_request_fails_alone(streamed: Session, decoder: Path) -> None:
    feeds = [bad() if number in (1, 2, 6) else sized(number) for number in range(9)]
    futures = [streamed.submit(each) for each in feeds]
    for number, future in enumerate(futures):
        if number in (1, 2, 6):
            with pytest.raises(EngineError, match=r"stage0.onnx failed: .*(?i:broadcast|dimension|shape)"):
                future.result(timeout=20)
        else:
            assert_close(future.result(timeout=20), run_whole(decoder, feeds[number]), 2e-5)


def test_submit_waits_while_as_many_as_allowed_are_under_way(package: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gate = threading.Event()
    run = OnnxRuntimeEngine.run
    monkeypatch.setattr(OnnxRuntimeEngine, "run", lambda self, *given: (gate.wait(20), run(self, *given))[1])
    with Session(package, in_flight=2) as session:
        futures = [session.submit(decoder_feeds()) for _ in range(2)]
        third: list[Future[Any]] = []
        waiting = threading.Thread(target=lambda: third.append(session.submit(decoder_feeds())))
        waiting.start()
        waiting.join(0.3)
        assert waiting.is_alive(), "a third request must wait for a place"
        gate.set()
        waiting.join(20)
        for future in (*futures, *third):
            future.result(timeout=20)


def test_map_takes_no_more_than_are_in_flight(package: Path) -> None:
    taken = itertools.count()

    def feeds() -> Iterator[Arrays]:
        for _ in range(100):
            next(taken)
            yield decoder_feeds()

    with Session(package, in_flight=3) as session:
        answers = session.map(feeds())
        next(answers)
        next(answers)
        answers.close()  # type: ignore[attr-defined]  # it is a generator
        assert next(taken) <= 5


def test_batch_is_cut_and_joined(streamed: Session, decoder: Path) -> None:
    feeds = decoder_feeds(batch=5)
    assert_close(streamed.run(feeds, micro_batch=2), run_whole(decoder, feeds), 2e-5)
    with pytest.raises(MisuseError, match=r"micro_batch 0: it is a number of rows from 1 on"):
        streamed.run(feeds, micro_batch=0)


def test_model_whose_rows_meet_is_not_cut(tmp_path: Path) -> None:
    from models.writer import save
    from tests.helpers.blocks import Block

    b = Block()
    x = b.data("x", (4, 12), ["n", 12])
    b.give(b.op("Softmax", b.op("MatMul", x, b.w("A", 12, 12)), axis=0), shape=["n", 12])
    save(b.model(), tmp_path / "model.onnx")
    compile_model(plan_model(tmp_path / "model.onnx", ["cpu0"], LAYER), tmp_path / "package")
    with (
        Session(tmp_path / "package") as session,
        pytest.raises(MisuseError, match="rows of a batch may depend on each other"),
    ):
        session.run(b.feeds, micro_batch=1)


def test_engine_that_raises_anything_fails_its_request_alone(
    streamed: Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = OnnxRuntimeEngine.run
    calls = itertools.count()

    def fail_once(self: OnnxRuntimeEngine, *given: Any) -> Any:
        if next(calls) == 2:
            raise MemoryError("no memory for this one")
        return run(self, *given)

    monkeypatch.setattr(OnnxRuntimeEngine, "run", fail_once)
    outcomes = [streamed.submit(decoder_feeds()) for _ in range(4)]
    errors = [future.exception(timeout=20) for future in outcomes]
    assert sum(isinstance(error, MemoryError) for error in errors) == 1
    assert sum(error is None for error in errors) == 3


@pytest.mark.parametrize("rank", [0, 1])
def test_thread_that_dies_ends_all_that_wait(streamed: Session, rank: int, monkeypatch: pytest.MonkeyPatch) -> None:
    serve = Worker._serve

    def die(self: Worker, request: Any) -> None:
        if self._setup.number == rank:
            raise SystemExit("the thread is gone")
        serve(self, request)

    monkeypatch.setattr(Worker, "_serve", die)
    for _ in range(3):
        with pytest.raises(SplitcError, match="the session is broken: SystemExit: the thread is gone"):
            streamed.submit(decoder_feeds()).result(timeout=20)
    start = time.monotonic()
    streamed.close()
    assert time.monotonic() - start < 5


def test_closing_cancels_what_has_not_begun(package: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    begun = threading.Event()
    run = OnnxRuntimeEngine.run

    def run_slowly(*args: Any, **options: Any) -> Any:
        begun.set()
        time.sleep(0.1)
        return run(*args, **options)

    monkeypatch.setattr(OnnxRuntimeEngine, "run", run_slowly)
    before = set(threading.enumerate())
    session = Session(package, in_flight=50)
    futures = [session.submit(decoder_feeds()) for _ in range(50)]
    assert begun.wait(10)
    session.close()
    outcomes = [future.exception(timeout=5) for future in futures]
    assert outcomes[0] is None
    assert all(error is None or "was closed before this request ran" in str(error) for error in outcomes)
    assert outcomes[-1] is not None
    assert not [thread for thread in set(threading.enumerate()) - before if thread.name.startswith("splitc rank")]
    with pytest.raises(SplitcError, match="the session is closed"):
        session.submit(decoder_feeds())


@pytest.mark.parametrize("mode", ["layer", "batch"])
def test_a_request_is_cancelled_until_a_rank_begins_it(
    decoder: Path, mode: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = compile_mode(decoder, mode)
    with Session(package, in_flight=4, ranks="threads") as session:
        begun, go_on = hold_engines(monkeypatch)
        futures = [session.submit(decoder_feeds(2)) for _ in range(4)]
        assert begun.wait(10)
        assert [future.cancel() for future in futures] == [False, True, True, True]
        go_on.set()
        assert len(wait(futures, 10).done) == 4
        assert "logits" in futures[0].result()
        with pytest.raises(CancelledError):
            futures[1].result()
        until(lambda: session.metrics.in_flight == 0)
        assert (session.metrics.done, session.metrics.failed) == (1, 0)
        assert "logits" in session.run(decoder_feeds())


def test_refused_feeds_take_no_place(package: Path) -> None:
    with Session(package, in_flight=1) as session:
        for _ in range(3):
            with pytest.raises(FeedError):
                session.submit({})
        session.run(decoder_feeds())


def test_interrupt_comes_after_all_ranks_have_the_request(
    package: Path, decoder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If only one rank had the request, later requests would get other requests' answers."""
    with Session(package, threads=1, ranks="threads") as session:
        worker = workers_of(session)[1]
        queue = worker.requests

        def interrupted(request: Any) -> None:
            monkeypatch.undo()
            signal.raise_signal(signal.SIGINT)
            queue.put(request)

        monkeypatch.setattr(worker, "requests", SimpleNamespace(put=interrupted, get=queue.get))
        with pytest.raises(KeyboardInterrupt):
            session.run(sized(1))
        for number in range(2, 5):
            assert_close(session.run(sized(number)), run_whole(decoder, sized(number)))


def test_interrupt_comes_after_all_processes_have_the_request(decoder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with Session(compile_mode(decoder, "tensor"), threads=1, ranks="processes") as session:
        channel = session._workers._wire._channels[1]  # type: ignore[union-attr]
        send = channel.send_nowait

        def interrupted(*message: Any) -> None:
            monkeypatch.undo()
            signal.raise_signal(signal.SIGINT)
            send(*message)

        monkeypatch.setattr(channel, "send_nowait", interrupted)
        with pytest.raises(KeyboardInterrupt):
            session.run(sized(1))
        for number in range(2, 5):
            assert_close(session.run(sized(number)), run_whole(decoder, sized(number)))


def test_request_that_some_processes_can_not_be_given_breaks_the_session(
    decoder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: Any) -> None:
        raise OSError(errno.EMFILE, "Too many open files")

    with Session(compile_mode(decoder, "tensor"), threads=1, ranks="processes") as session:
        monkeypatch.setattr(session._workers._wire._channels[1], "send_nowait", full)  # type: ignore[union-attr]
        with pytest.raises(EngineError, match=r"rank 1 could not be given a request: .*Too many open files"):
            session.run(decoder_feeds())
        monkeypatch.undo()
        with pytest.raises(SplitcError, match="the session is broken: HandOverError: rank 1 could not be given"):
            session.run(decoder_feeds())


@pytest.mark.parametrize(
    ("mode", "ranks"), [*product(("layer", "tensor"), ("threads", "processes")), ("row", "threads")]
)
def test_rank_that_misses_a_request_breaks_the_session(
    decoder: Path, mode: str, ranks: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise the next request would get values of this one."""
    with Session(compile_mode(decoder, mode), threads=1, ranks=ranks) as session:
        assert_close(session.run(sized(1)), run_whole(decoder, sized(1)), 2e-5)
        workers: Any = session._workers
        if ranks == "threads":
            monkeypatch.setattr(workers_of(session)[1], "requests", SimpleQueue())
        else:
            monkeypatch.setattr(workers._wire._channels[1], "send_nowait", lambda *_: None)
        missed = session.submit(sized(2))
        monkeypatch.undo()
        with pytest.raises(SplitcError, match=r"the session is broken: .*(out of step|not given the same)"):
            session.run(sized(3))
        assert "the session is broken" in str(missed.exception(20))
        assert not session.usable


@pytest.mark.usefixtures("children_of_sessions")  # what they are forked from has usual sockets
def test_callbacks_submit_to_processes_whose_sockets_are_full(decoder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The thread that reads answers must not wait for room for a request while a rank waits for room for its answer."""
    make = socket.socketpair

    def make_small() -> tuple[socket.socket, socket.socket]:
        made = make()
        for each in made:
            each.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1)  # the system makes it a few KiB
        return made

    monkeypatch.setattr(socket, "socketpair", make_small)
    count, chained = 40, SimpleQueue[Future[Any]]()
    with Session(compile_mode(decoder, "layer"), threads=1, ranks="processes", in_flight=2 * count) as session:
        monkeypatch.undo()
        for _ in range(count):
            future = session.submit(sized(1))
            future.add_done_callback(lambda _: chained.put(session.submit(sized(2))))
        for _ in range(count):
            chained.get(timeout=20).result(20)


def test_request_that_can_not_be_handed_over_takes_no_place(package: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(_: Any) -> None:
        raise OSError(errno.EMFILE, "Too many open files")

    with Session(package, threads=1, in_flight=2) as session:
        monkeypatch.setattr(session._workers, "put", full)
        for _ in range(3):
            with pytest.raises(OSError, match="Too many open files"):
                session.run(decoder_feeds())
        monkeypatch.undo()
        session.run(decoder_feeds())


def test_interrupt_ends_the_wait_for_a_place(package: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with Session(package, threads=1, in_flight=1) as session:
        place = session._admission._places
        assert place.acquire()
        threading.Timer(0.3, signal.raise_signal, [signal.SIGINT]).start()
        with pytest.raises(KeyboardInterrupt):
            session.run(decoder_feeds())
        place.release()
        session.run(decoder_feeds())


def test_interrupt_in_mid_run_ends_the_program(package: Path, tmp_path: Path) -> None:
    """Ctrl-C in a stream of requests: the program ends within seconds, with all threads."""
    save_arrays(tmp_path / "in.npz", decoder_feeds())
    program = textwrap.dedent(
        f"""
        import numpy as np
        from splitc.runtime import Session

        feeds = dict(np.load({str(tmp_path / "in.npz")!r}))
        with Session({str(package)!r}) as session:
            for number, _ in enumerate(session.map(feeds for _ in iter(int, 1))):
                if number == 8:
                    print("running", flush=True)
        """
    )
    child = subprocess.Popen(
        [sys.executable, "-c", program],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=listen_to_interrupts,
    )
    try:
        assert child.stdout is not None
        assert child.stdout.readline() == "running\n"
        os.kill(child.pid, signal.SIGINT)
        _, errors = child.communicate(timeout=20)
    finally:
        child.kill()
    assert child.returncode != 0
    assert "KeyboardInterrupt" in errors


def test_values_of_many_requests_are_let_go(package: Path) -> None:
    """Leaks of requests would show as growing numbers of objects."""
    import gc

    import onnxruntime as ort

    def alive() -> int:
        gc.collect()
        return sum(isinstance(each, (ort.OrtValue, np.ndarray)) for each in gc.get_objects())

    with Session(package) as session:
        list(session.map(decoder_feeds() for _ in range(5)))
        before = alive()
        list(session.map(decoder_feeds() for _ in range(30)))
        assert alive() <= before + 5
