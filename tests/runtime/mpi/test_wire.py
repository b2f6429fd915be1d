"""The session's end of its messages by MPI, without MPI."""

from __future__ import annotations

from typing import Any, cast

import pytest

from splitc.runtime.errors import HandOverError
from splitc.runtime.mpi.messages import Left, Stop
from splitc.runtime.mpi.messenger import Messenger
from splitc.runtime.mpi.wire import MpiWire, OwnControl
from splitc.runtime.processes.messages import Forget, Order
from splitc.runtime.processes.wire import LOST


class Silent:
    """A post that receives nothing."""

    def receive(self, seconds: float) -> None:
        pass


def test_what_has_arrived_is_taken_without_time_to_wait() -> None:
    own = OwnControl()
    wire = MpiWire(cast("Messenger", Silent()), [0], own, spin=0.0)
    own.send(Left())
    assert wire.take(0.0) == [(0, LOST)]
    assert wire.take(0.0) == []


class Noted(Silent):
    """A post that records what is sent. Sending to the rank `full` fails."""

    def __init__(self, full: int | None = None) -> None:
        self.full = full
        self.sent: list[tuple[int, Any]] = []

    def send(self, target: int, parcel: Any) -> None:
        if target == self.full:
            raise MemoryError("no memory for the message")
        self.sent.append((target, parcel[0]))


def test_request_that_only_some_ranks_get_is_no_request_that_fails_alone() -> None:
    """Otherwise the next request would have its number, and ranks would compute different requests as one."""
    post = Noted(full=2)
    wire = MpiWire(cast("Messenger", post), [0, 0, 0], OwnControl(), spin=0.0)
    with pytest.raises(HandOverError, match="rank 2 could not be given a request: MemoryError"):
        wire.order(Order(0, None, 0, {}, None, False, None, 0, None, ()), [], [])
    assert [rank for rank, _ in post.sent] == [1]


def test_ranks_are_told_when_that_of_the_session_has_left() -> None:
    post, own, message = Noted(), OwnControl(), Forget(0, True)
    wire = MpiWire(cast("Messenger", post), [0, 0, 0], own, spin=0.0)
    own.send(Left())
    assert wire.take(0.0) == [(0, LOST)]
    wire.send(message)
    assert post.sent == [(1, message), (2, message)]


def test_others_are_told_that_the_session_ends_where_one_can_not_be() -> None:
    """Requests in flight must end even if sending raises the error that broke the session."""
    post, own = Noted(full=1), OwnControl()
    MpiWire(cast("Messenger", post), [0, 0, 0], own, spin=0.0).send(Stop())
    assert post.sent == [(2, Stop())]
    assert own.inbox.get(timeout=5) == (Stop(), None)
