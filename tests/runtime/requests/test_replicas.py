"""Groups of ranks that divide a request's rows: results, sequences, and errors."""

from __future__ import annotations

import errno
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from splitc.compiler import Request, compile_model, plan_model
from splitc.runtime import Session
from splitc.runtime.errors import EngineError, FeedError, MisuseError, SplitcError
from splitc.runtime.processes.ranks import RankProcesses
from splitc.runtime.requests.replicas import Replicas
from tests.conftest import Arrays, assert_close, decoder_feeds, run_whole, until
from tests.helpers.packages import compile_mode
from tests.helpers.sweep import sized
from tests.helpers.workers import workers_of

# Rows are embeddings of ids below 4, so that a row of others fails; along axis 1, and there may be none.
LOOKUP = """<ir_version: 8, opset_import: ["": 17]>
lookup (int64[L,B] ids, float[3] bias) => (float[B,3] y)
<float[4,3] table = {0,1,2,3,4,5,6,7,8,9,10,11}, int64[1] first = {0}>
{ words = Gather(table, ids)
  sums = ReduceSum <keepdims = 0> (words, first)
  y = Add(sums, bias) }"""


@pytest.fixture(params=["batch", "tensor in groups"])
def grouped(request: pytest.FixtureRequest, decoder: Path) -> Path:
    return compile_mode(decoder, request.param)


in_both_ways = pytest.mark.parametrize(("mode", "ranks"), [("batch", "threads"), ("tensor in groups", "processes")])


@pytest.fixture
def lookup(write_model: Callable[[str], Path], tmp_path: Path) -> Path:
    """A package of three replicas."""
    compile_model(plan_model(write_model(LOOKUP), ["3xcpu"], Request(split_mode="batch")), tmp_path / "package")
    return tmp_path / "package"


def replicas(session: Session) -> Replicas:
    assert isinstance(session._workers, Replicas)
    return session._workers


@in_both_ways
def test_any_number_of_rows_is_right(decoder: Path, mode: str, ranks: str) -> None:
    with Session(compile_mode(decoder, mode), threads=1, ranks=ranks) as session:
        for rows in (1, 2, 4, 5):
            feeds = decoder_feeds(rows)
            expected = run_whole(decoder, feeds)
            assert_close(session.run(feeds), expected, 2e-5)
            assert_close(session.submit(feeds).result(), expected, 2e-5)
            assert_close(session.run(feeds, micro_batch=3), expected, 2e-5)
        several = [sized(number) for number in range(8)]
        for outputs, feeds in zip(session.map(several), several, strict=True):
            assert_close(outputs, run_whole(decoder, feeds), 2e-5)
        assert replicas(session)._at_work == [0, 0]


@pytest.mark.parametrize("shape", [(2, 7), (2, 2), (2, 1), (2, 0), (0, 5)])
def test_rows_may_be_fewer_than_replicas_or_none(lookup: Path, shape: tuple[int, int]) -> None:
    ids, bias = np.arange(np.prod(shape)).reshape(shape) % 4, np.ones(3, np.float32)
    with Session(lookup) as session:
        outputs, executions = session.run_timed({"ids": ids, "bias": bias})
    assert outputs["y"].tolist() == (np.arange(12, dtype=np.float32).reshape(4, 3)[ids].sum(0) + 1).tolist()
    assert len(executions) == min(3, max(1, shape[1]))


def test_requests_of_one_row_go_to_whichever_is_free(lookup: Path) -> None:
    feeds: Arrays = {"ids": np.zeros((1, 1), np.int64), "bias": np.zeros(3, np.float32)}
    with Session(lookup, in_flight=6) as session:
        given: list[int] = []
        for number, ranks in enumerate(replicas(session)._replicas):
            ranks.put = lambda part, number=number: given.append(number)  # type: ignore[method-assign, misc]
        for _ in range(6):
            session.submit(feeds)
        assert sorted(given) == [0, 0, 1, 1, 2, 2], "none ended"
        for ranks in replicas(session)._replicas:
            del ranks.put
        session._admission.fail(SplitcError("the test ends"))


def test_error_in_one_replica_fails_the_request_alone(lookup: Path) -> None:
    bias = np.zeros(3, np.float32)
    with Session(lookup) as session:
        for row in range(6):
            ids = np.zeros((1, 6), np.int64)
            ids[0, row] = 9
            with pytest.raises(EngineError, match="out of"):
                session.run({"ids": ids, "bias": bias})
            assert session.run({"ids": ids % 4, "bias": bias})["y"].shape == (6, 3)
        assert replicas(session)._at_work == [0, 0, 0]


@pytest.mark.parametrize("ranks", ["threads", "processes"])
def test_part_that_can_not_be_handed_over_fails_the_request_alone(
    decoder: Path, ranks: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(_: Any) -> None:
        raise OSError(errno.EMFILE, "Too many open files")

    with Session(compile_mode(decoder, "batch"), threads=1, ranks=ranks, in_flight=1) as session:
        for number in range(2):
            monkeypatch.setattr(replicas(session)._replicas[number], "put", full)
            with pytest.raises(OSError, match="Too many open files"):
                session.run(decoder_feeds(4))
            monkeypatch.undo()
            assert_close(session.run(decoder_feeds(4)), run_whole(decoder, decoder_feeds(4)))
        assert replicas(session)._at_work == [0, 0]


def test_interrupt_comes_after_all_replicas_have_their_part(decoder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with Session(compile_mode(decoder, "batch"), threads=1, in_flight=2) as session:
        first = replicas(session)._replicas[0]
        put = first.put

        def interrupted(part: Any) -> None:
            monkeypatch.undo()
            signal.raise_signal(signal.SIGINT)
            put(part)

        monkeypatch.setattr(first, "put", interrupted)
        with pytest.raises(KeyboardInterrupt):
            session.run(sized(1))
        for number in range(2, 5):
            assert_close(session.run(sized(number)), run_whole(decoder, sized(number)))
        assert replicas(session)._at_work == [0, 0]


def test_replica_that_dies_breaks_the_session(decoder: Path) -> None:
    with Session(compile_mode(decoder, "batch"), threads=1, ranks="processes") as session:
        session.run(decoder_feeds(4))
        second = replicas(session)._replicas[1]
        assert isinstance(second, RankProcesses)
        second._processes[0]._process.kill()
        with pytest.raises(SplitcError, match=r"rank 1 \(cpu1\) was ended by SIGKILL"):
            session.run(decoder_feeds(4))
        with pytest.raises(SplitcError, match="the session is broken"):
            session.run(decoder_feeds(1))


def step(rows: int, past: int, new: int) -> Arrays:
    """A step of a sequence, with other tokens in each row."""
    place = np.arange(past, past + new)
    return {
        "input_ids": (7 * place + 5 * np.arange(rows)[:, None]) % 90,
        "attention_mask": np.ones((rows, past + new), np.int64),
        "position_ids": np.broadcast_to(place, (rows, new)).copy(),
    }


@pytest.mark.parametrize(
    ("mode", "ranks", "capacity"), [("tensor in groups", "threads", None), ("batch", "processes", 6)]
)
def test_sequences_of_any_rows_keep_their_states_where_they_are(
    decoder: Path, mode: str, ranks: str, capacity: int | None
) -> None:
    whole = {rows: run_whole(decoder, {**decoder_feeds(rows, 1, 0), **step(rows, 0, 8)}) for rows in (1, 3)}
    with Session(compile_mode(decoder, mode), threads=1, ranks=ranks) as session:
        opened = [(rows, session.start(capacity)) for rows in (1, 3, 1, 3)]
        for past, new in ((0, 4), (4, 1), (5, 1), (6, 2)):
            for rows, sequence in opened:
                if capacity is not None and past == 6:
                    sequence.grow(9)
                if past and rows == 3:
                    said = "began with 3 rows, of which 2 groups of devices have 2, 1, and the request has 2: give it"
                    with pytest.raises(FeedError, match=said):
                        sequence.run(step(2, past, new))
                logits = sequence.run(step(rows, past, new))["logits"]
                expected = whole[rows]["logits"][:, past : past + new]
                np.testing.assert_allclose(logits, expected, rtol=1e-4, atol=1e-5)
        homes = [replicas(session)._sequences[sequence._numbers[-1]] for _, sequence in opened]
        assert homes[1] == homes[3] == [(0, 2), (1, 1)]
        assert [home[0][0] for home in (homes[0], homes[2])] == [0, 1], "shared out, though both were free"
        for _, sequence in opened:
            sequence.close()
        assert replicas(session)._sequences == {}
        if ranks == "threads":
            until(lambda: not any(worker.computation.sequences for worker in workers_of(session)))


def test_package_runs_on_other_numbers_of_devices(grouped: Path, decoder: Path) -> None:
    feeds = decoder_feeds(5)
    expected = run_whole(decoder, feeds)
    size = len(Session(grouped).manifest.ranks)
    for groups in (1, 3):
        with Session(grouped, threads=1, devices=[f"{groups * size}xcpu"]) as session:
            assert_close(session.run(feeds), expected, 2e-5)
    if size > 1:
        with pytest.raises(MisuseError, match="each replica of the package has 2 ranks, and 3 devices are named"):
            Session(grouped, devices=["3xcpu"])


def test_one_row_may_stand_for_all(write_model: Callable[[str], Path], tmp_path: Path) -> None:
    """If all outputs depend on an input with all rows. Otherwise the model's own result or error is right."""
    model = write_model(
        """<ir_version: 8, opset_import: ["": 17]>
        add (float[A,3] a, float[B,3] b) => (float[C,3] y, float[B,3] z) { y = Add(a, b) z = Neg(b) }"""
    )
    shapes = {"a": (4, 3), "b": (4, 3)}
    compile_model(plan_model(model, ["2xcpu"], Request(split_mode="batch", shapes=shapes)), tmp_path / "package")
    one, four, two = (np.random.default_rng(0).random((rows, 3), np.float32) for rows in (1, 4, 2))
    with Session(tmp_path / "package") as session:
        assert session.manifest.batch == {"a": 0, "b": 0, "y": 0, "z": 0}
        assert session.manifest.row_sources == ["b"]
        for a, b, ranks in ((four, four, 2), (four, one, 1), (one, four, 2)):
            outputs, executions = session.run_timed({"a": a, "b": b})
            assert outputs["y"].tolist() == (a + b).tolist()
            assert outputs["z"].tolist() == (-b).tolist()
            assert len(executions) == ranks
        with pytest.raises(EngineError):
            session.run({"a": four, "b": two})


def test_more_rows_than_are_picked_are_no_rows_of_the_request(
    write_model: Callable[[str], Path], tmp_path: Path
) -> None:
    """As with a mask, from which each row takes its own by a number counted from another input."""
    model = write_model(
        """<ir_version: 8, opset_import: ["": 17]>
        pick (float[A,3] x, float[B,3] mask) => (float[C,3] y) <int64[1] at = {0}, int64 zero = {0}, int64 one = {1}> {
            sizes = Shape(x) first = Gather(sizes, at) rows = Squeeze(first) numbers = Range(zero, rows, one)
            own = Gather(mask, numbers) y = Add(x, own) }"""
    )
    shapes = {"x": (4, 3), "mask": (4, 3)}
    compile_model(plan_model(model, ["2xcpu"], Request(split_mode="batch", shapes=shapes)), tmp_path / "package")
    one, four = (np.random.default_rng(0).random((rows, 3), np.float32) for rows in (1, 4))
    with Session(tmp_path / "package") as session:
        for x, ranks in ((one, 1), (four, 2)):
            outputs, executions = session.run_timed({"x": x, "mask": four})
            assert outputs["y"].tolist() == (x + four[: len(x)]).tolist()
            assert len(executions) == ranks
