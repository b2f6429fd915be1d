"""Ranks' processes as the session sees them: late messages, and processes that fall silent."""

from __future__ import annotations

import signal
import subprocess
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from splitc.runtime import Session
from splitc.runtime.adapters.held import HeldSum
from splitc.runtime.errors import EngineError, HandOverError
from splitc.runtime.processes.device_processes import DeviceProcess, kill
from splitc.runtime.processes.messages import Answer, Order
from splitc.runtime.processes.ranks import RankProcesses
from splitc.runtime.ranks.request import InFlightRequest
from tests.conftest import decoder_feeds
from tests.helpers.packages import compile_mode
from tests.helpers.stopping import stop


def ranks_of(session: Session) -> RankProcesses:
    assert isinstance(session._workers, RankProcesses)
    return session._workers


def test_rank_that_does_not_answer_a_question_has_no_notes(decoder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with Session(compile_mode(decoder, "one device"), threads=1, ranks="processes") as session:
        monkeypatch.setattr("splitc.runtime.processes.remote.PATIENCE", 0.2)
        victim = ranks_of(session)._processes[0]._process
        stop(victim.pid)
        assert session.notes == []
        victim.send_signal(signal.SIGCONT)
        session.run(decoder_feeds())


def test_rank_that_answers_another_request_than_is_due_has_missed_one(decoder: Path) -> None:
    """Other ranks may have summed values of two requests, since values have no request numbers on GPUs."""
    with Session(compile_mode(decoder, "one device"), threads=1, ranks="processes") as session:
        session.run(decoder_feeds())
        ranks = ranks_of(session)
        ranks._requests[2] = InFlightRequest({}, waiting=1)
        with pytest.raises(HandOverError, match=r"rank 0 \(cpu0\) answers request 2 before request 1"):
            ranks._take(0, Answer(2, None, 0.0, 0.0, (), False, None))
        del ranks._requests[2]


def test_sum_of_adapters_whose_rank_fails_at_once_is_sent_again(decoder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The rank's answer may come before the request is counted as sent."""
    with Session(compile_mode(decoder, "one device"), threads=1, ranks="processes") as session:
        ranks = ranks_of(session)

        def fail(order: Order, feeds: object, initial: object) -> None:
            ranks._take(0, Answer(order.number, None, 0.0, 0.0, (), False, EngineError("no memory")))

        monkeypatch.setattr(ranks._wire, "order", fail)
        ranks.put(InFlightRequest({}, adapters=HeldSum(7, {})))
        assert ranks._held == set()


class Stuck:
    """A process that its GPU keeps from ending."""

    pid, poll, kill = -1, staticmethod(lambda: None), staticmethod(lambda: None)

    def wait(self, timeout: float | None = None) -> None:
        assert timeout is not None, "this would wait for ever"
        raise subprocess.TimeoutExpired("rank", timeout)


def test_process_that_does_not_end_is_not_waited_for() -> None:
    process: Any = object.__new__(DeviceProcess)
    process._process, process.pid, process._why, process._pulse = Stuck(), -1, None, np.zeros(1)
    process._channel = SimpleNamespace(close=lambda: None)
    for _ in range(2):
        assert process.how_it_ended() == "has closed its connection, and has not ended for 5 s"
        kill([process], EngineError("its rank hangs"))
