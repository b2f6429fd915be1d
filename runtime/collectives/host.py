"""Ranks that are threads of one process: a value is handed on as it is."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from queue import SimpleQueue
from typing import Any

from splitc.runtime.failures import Failure
from splitc.runtime.steps import Reduce

Channels = dict[tuple[int, int], "SimpleQueue[tuple[str | None, Any]]"]


@dataclass
class Meeting:
    """Where the ranks of a group hand in their parts. The last one to come brings them together, for all."""

    ranks: Sequence[int]
    lock: threading.Lock = field(default_factory=threading.Lock)
    parts: dict[int, tuple[Reduce, Any]] = field(default_factory=dict)
    results: dict[int, SimpleQueue[Any]] = field(default_factory=dict)
    aborted: Failure | None = None

    def __post_init__(self) -> None:
        self.results = {rank: SimpleQueue() for rank in self.ranks}

    def reduce(self, rank: int, step: Reduce, parts: Any, accumulate: Callable[[str, Any, Any], None]) -> Any:
        with self.lock:
            if self.aborted is not None:
                return self.aborted
            self.parts[rank] = (step, parts)
            last = len(self.parts) == len(self.ranks)
            if last:
                handed_in, self.parts = self.parts, {}
        if last:
            wholes = self._bring_together([handed_in[each] for each in self.ranks], accumulate)
            for each in self.ranks:
                self.results[each].put(wholes)
        return self.results[rank].get()

    def abort(self, failure: Failure) -> None:
        with self.lock:
            self.aborted = failure
        for results in self.results.values():
            results.put(failure)

    def _bring_together(
        self, handed_in: Sequence[tuple[Reduce, Any]], accumulate: Callable[[str, Any, Any], None]
    ) -> Any:
        """The first rank's parts with those of the others in them; what a rank that failed handed in, if any."""
        failed = next((parts for _, parts in handed_in if not isinstance(parts, list)), None)
        if failed is not None:
            return failed
        step, totals = handed_in[0]
        if any(other != step for other, _ in handed_in):
            raise RuntimeError(f"ranks do not reduce the same values: {[other for other, _ in handed_in]}")
        for _, parts in handed_in[1:]:
            for total, part in zip(totals, parts):
                accumulate(step.operation, total, part)
        return totals


@dataclass
class Hub:
    """What the ranks of a session share: a channel from each to each, a meeting for each group, and its end."""

    channels: Channels
    meetings: dict[tuple[int, ...], Meeting] = field(default_factory=dict)
    failure: Failure | None = None


class LocalTransport:
    """The end that belongs to `rank`."""

    def __init__(self, rank: int, hub: Hub) -> None:
        self.rank = rank
        self.hub = hub

    def leave(self) -> None:
        pass

    def join(self, group: Sequence[int]) -> Any:
        raise RuntimeError("engines on CPU devices exchange nothing while they run")

    def send(self, target: int, name: str, value: Any) -> None:
        self.hub.channels[self.rank, target].put((name, value))

    def receive(self, source: int, name: str) -> Any:
        channel = self.hub.channels[source, self.rank]
        sent, value = channel.get()
        if sent is None:
            channel.put((None, value))  # for whoever receives next
            return value
        if sent != name:
            raise RuntimeError(f"rank {self.rank} waits for '{name}' from rank {source}, which sent '{sent}'")
        return value

    def abort(self, error: BaseException) -> None:
        failure = Failure(error)
        self.hub.failure = failure
        for channel in self.hub.channels.values():
            channel.put((None, failure))
        for meeting in list(self.hub.meetings.values()):
            meeting.abort(failure)

    def reduce(self, step: Reduce, parts: Any, accumulate: Callable[[str, Any, Any], None]) -> Any:
        group = tuple(step.ranks)
        # Made by whoever comes first: dict.setdefault is atomic.
        meeting = self.hub.meetings.get(group) or self.hub.meetings.setdefault(group, Meeting(group))
        if self.hub.failure is not None:  # a meeting made after the end would not know of it
            return self.hub.failure
        return meeting.reduce(self.rank, step, parts, accumulate)


def connect(ranks: int) -> list[LocalTransport]:
    """The ends of a new set of channels, one a rank."""
    hub = Hub({(source, target): SimpleQueue() for source in range(ranks) for target in range(ranks)})
    return [LocalTransport(rank, hub) for rank in range(ranks)]
