"""The threads of a session's ranks."""

from __future__ import annotations

from splitc.runtime import Session
from splitc.runtime.ranks.thread import Worker
from splitc.runtime.ranks.workers import Workers
from splitc.runtime.requests.replicas import Replicas


def workers_of(session: Session) -> list[Worker]:
    """The session's ranks, which must be threads. Those of a second replica follow those of the first."""
    ranks = session._workers
    groups = ranks._replicas if isinstance(ranks, Replicas) else [ranks]
    assert all(isinstance(group, Workers) for group in groups)
    return [worker for group in groups for worker in group._workers]  # type: ignore[union-attr]
