"""The session's end of its messages by MPI, without MPI."""

from __future__ import annotations

from typing import cast

from splitc.runtime.mpi.joining import Left
from splitc.runtime.mpi.mpi_wire import MpiWire, OwnControl
from splitc.runtime.mpi.post import Post
from splitc.runtime.processes.wire import LOST


class Silent:
    """A post by which nothing comes."""

    def receive(self, seconds: float) -> None:
        pass


def test_what_has_arrived_is_taken_without_time_to_wait() -> None:
    own = OwnControl()
    wire = MpiWire(cast("Post", Silent()), [0], own, spin=0.0)
    own.send(Left())
    assert wire.take(0.0) == [(0, LOST)]
    assert wire.take(0.0) == []
