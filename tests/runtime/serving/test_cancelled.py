"""Clients cancel requests that wait: others are still answered."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from splitc.runtime.errors import MisuseError
from splitc.runtime.serving.kept_sequences import Answer, KeptSequences, SequenceStep
from splitc.runtime.serving.served_package import ServedPackage, ServedRequest
from splitc.runtime.serving.serving_file import FILE_NAME, Serving, write_serving
from tests.conftest import assert_close, decoder_feeds, run_whole, until


class Counting:
    """A sequence that counts its requests, each of which waits for the gate."""

    def __init__(self) -> None:
        self.gate = threading.Event()
        self.count, self.closed = 0, False

    def run(self, feeds: Mapping[str, Any]) -> dict[str, Any]:
        assert self.gate.wait(20)
        self.count += 1
        return {"count": self.count}

    def close(self) -> None:
        self.closed = True


@pytest.mark.parametrize("last", [False, True])
def test_sequence_goes_on_after_a_cancelled_request(last: bool) -> None:
    sequence: Any = Counting()
    session: Any = SimpleNamespace(start=lambda _, adapters: sequence)
    kept = KeptSequences(session, ThreadPoolExecutor(2), None, 0.2, None)
    first = kept.submit(SequenceStep(1, start=True), {})
    second = kept.submit(SequenceStep(1, end=last), {})
    assert second.cancel()
    sequence.gate.set()
    assert first.result(20) == {"count": 1}
    if not last:
        assert kept.submit(SequenceStep(1), {}).result(20) == {"count": 2}
    until(lambda: sequence.closed)  # with its last request, or as one that nobody goes on with
    kept.close()


class Limited(Counting):
    """It has room for requests without feeds, and is lost if one is asked to fail."""

    usable = True

    def run(self, feeds: Mapping[str, Any]) -> dict[str, Any]:
        if feeds:
            self.usable = "fail" not in feeds
            raise MisuseError("no room") if self.usable else RuntimeError("lost")
        return super().run(feeds)


def test_sequence_goes_on_after_a_request_that_it_refuses() -> None:
    """As one with more tokens than its capacity. Nothing ran."""
    sequence = Limited()
    sequence.gate.set()
    session: Any = SimpleNamespace(start=lambda _, adapters: sequence)
    kept = KeptSequences(session, ThreadPoolExecutor(2), None, 20, None)
    assert kept.submit(SequenceStep(1, start=True), {}).result(20) == {"count": 1}
    with pytest.raises(MisuseError, match="no room"):
        kept.submit(SequenceStep(1), {"ids": np.ones(2)}).result(20)
    assert kept.submit(SequenceStep(1), {}).result(20) == {"count": 2}
    with pytest.raises(RuntimeError, match="lost"):
        kept.submit(SequenceStep(1), {"fail": np.ones(1)}).result(20)
    until(lambda: sequence.closed and not kept._kept)
    kept.close()


class Full(ThreadPoolExecutor):
    """A pool that can't start a thread while it is full."""

    full = False

    def submit(self, *work: Any, **options: Any) -> Any:
        if self.full:
            raise RuntimeError("can't start new thread")
        return super().submit(*work, **options)


def test_sequence_goes_on_after_a_request_that_no_thread_could_run() -> None:
    """It kept the request and its place, and ran nothing any more."""
    made: list[Counting] = []

    def start(_: None, adapters: Any) -> Any:
        made.append(Counting())
        made[-1].gate.set()
        return made[-1]

    session: Any = SimpleNamespace(start=start)
    pool = Full(2)
    kept = KeptSequences(session, pool, None, 20, None)
    assert kept.submit(SequenceStep(1, start=True), {}).result(20) == {"count": 1}
    until(lambda: not kept._kept[1].working)
    pool.full = True
    for step in (SequenceStep(1), SequenceStep(1, end=True), SequenceStep(2, start=True)):
        with pytest.raises(RuntimeError, match="thread"):
            kept.submit(step, {})
    assert len(kept._kept) == 1 and made[1].closed  # the sequence that could not begin is not open
    pool.full = False
    assert kept.submit(SequenceStep(1, end=True), {}).result(20) == {"count": 2}
    kept.close()


def test_others_of_a_batch_are_answered(package: Path, decoder: Path, tmp_path: Path) -> None:
    write_serving(tmp_path, Serving(str(package), threads=1))
    served = ServedPackage(tmp_path / FILE_NAME)
    asked = [decoder_feeds(rows) for rows in (1, 2, 3)]
    answers: list[Answer] = [Future() for _ in asked]
    answers[1].cancel()
    served._serve(asked, answers, "")
    for number in (0, 2):
        assert_close(answers[number].result(0), run_whole(decoder, asked[number]), 2e-5)
    served.close()


def test_requests_that_no_thread_can_run_take_no_place(
    package: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise the server would wait forever after as many of them as may be in flight."""
    write_serving(tmp_path, Serving(str(package), threads=1, in_flight=2))
    served = ServedPackage(tmp_path / FILE_NAME)

    def full(*_: Any) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patch:
        patch.setattr(served._pool, "submit", full)
        for _ in range(3):
            (answer,) = served.submit([ServedRequest(decoder_feeds())])
            assert "can't start new thread" in str(answer.exception(0))
    (answer,) = served.submit([ServedRequest(decoder_feeds())])
    assert answer.result(20)
    served.close()
