"""The threads of a session's ranks."""

from __future__ import annotations

from splitc.runtime import Session
from splitc.runtime.ranks.workers import Workers


def workers_of(session: Session) -> Workers:
    """The session's ranks, which must be threads."""
    assert isinstance(session._workers, Workers)
    return session._workers
