"""A session's counters: its requests, and the working time of its ranks' engines."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass, fields

from splitc.runtime.package.steps import Run
from splitc.runtime.ranks.loop import Replay, Span
from splitc.runtime.ranks.request import InFlightRequest


@dataclass(frozen=True)
class Metrics:
    """Counters of a session.

    - `done`, `failed`: requests that ended so; others were cancelled.
    - `in_flight`: requests that have a place and have not ended.
    - `replayed`: requests done that all ranks replayed as CUDA graphs.
    - `captured`: requests done for which the graph was captured.
    - `busy`: for each rank, the seconds that its engines or graphs ran.
    """

    done: int = 0
    failed: int = 0
    in_flight: int = 0
    captured: int = 0
    replayed: int = 0
    busy: tuple[float, ...] = ()

    def __add__(self, other: Metrics) -> Metrics:
        """The sums, for successive sessions with the same ranks."""
        busy = zip(self.busy or (0.0,) * len(other.busy), other.busy or (0.0,) * len(self.busy), strict=True)
        counts = [field.name for field in fields(self) if field.name != "busy"]
        sums = {name: getattr(self, name) + getattr(other, name) for name in counts}
        return Metrics(**sums, busy=tuple(one + two for one, two in busy))


def is_replayed(request: InFlightRequest) -> bool:
    """Whether all ranks that ran the request replayed it."""
    replays = _replays(request)
    return bool(replays) and None not in replays


def _replays(request: InFlightRequest) -> list[Replay | None]:
    """The replay of each rank that ran the request; None for a rank that ran its steps."""
    ran = request.executions.values()
    return [step if isinstance(step := one.spans[0].step, Replay) else None for one in ran if one.spans]


class Counters:
    """Counts the requests of a session. Any thread may call it."""

    def __init__(self, ranks: int) -> None:
        self._lock = threading.Lock()
        self._done = self._failed = self._in_flight = self._captured = self._replayed = 0
        self._busy = [0.0] * ranks

    def begin(self) -> None:
        """Count a request that has got a place."""
        with self._lock:
            self._in_flight += 1

    def end(self, request: InFlightRequest, *, done: bool, failed: bool) -> bool:
        """Count a request that has ended: neither done nor failed if it was cancelled.

        Returns whether a graph was captured for it, on any rank.
        """
        replays = _replays(request)
        captured = any(replay.captured for replay in replays if replay is not None)
        replayed = bool(replays) and None not in replays
        with self._lock:
            self._in_flight -= 1
            for rank, ran in request.executions.items():
                self._busy[rank] += _seconds(ran.spans)
            self._failed += failed
            self._done += done
            self._captured += done and captured
            self._replayed += done and replayed
        return captured

    def read(self) -> Metrics:
        """A consistent copy of all counters."""
        with self._lock:
            return Metrics(self._done, self._failed, self._in_flight, self._captured, self._replayed, tuple(self._busy))


def _seconds(spans: Sequence[Span]) -> float:
    return sum([span.end - span.start for span in spans if isinstance(span.step, (Run, Replay))])
