"""Ranks that are threads of one process: a value is handed on as it is."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from queue import SimpleQueue
from typing import Any

Channels = dict[tuple[int, int], "SimpleQueue[tuple[str, Any]]"]


@dataclass
class Meeting:
    """Where the ranks of a group hand in their parts. The last one to come adds them up and gives all the sums."""

    ranks: Sequence[int]
    lock: threading.Lock = field(default_factory=threading.Lock)
    parts: dict[int, tuple[Sequence[str], Any]] = field(default_factory=dict)
    results: dict[int, SimpleQueue[Any]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.results = {rank: SimpleQueue() for rank in self.ranks}

    def reduce(self, rank: int, names: Sequence[str], parts: Any, accumulate: Callable[[Any, Any], None]) -> Any:
        with self.lock:
            self.parts[rank] = (names, parts)
            last = len(self.parts) == len(self.ranks)
            if last:
                handed_in, self.parts = self.parts, {}
        if last:
            sums = self._add_up([handed_in[each] for each in self.ranks], accumulate)
            for each in self.ranks:
                self.results[each].put(sums)
        return self.results[rank].get()

    def _add_up(self, parts: Sequence[tuple[Sequence[str], Any]], accumulate: Callable[[Any, Any], None]) -> Any:
        """The first rank's parts with those of the others added to them; what a rank that failed handed in, if any."""
        failed = next((each for _, each in parts if not isinstance(each, list)), None)
        if failed is not None:
            return failed
        if any(list(names) != list(parts[0][0]) for names, _ in parts):
            raise RuntimeError(f"ranks {list(self.ranks)} do not sum the same values: {[names for names, _ in parts]}")
        for number, total in enumerate(parts[0][1]):
            for _, own in parts[1:]:
                accumulate(total, own[number])
        return parts[0][1]


class LocalTransport:
    """The end that belongs to `rank` of channels and meetings which all ranks of a session share."""

    def __init__(self, rank: int, channels: Channels, meetings: dict[tuple[int, ...], Meeting]) -> None:
        self._rank = rank
        self._channels = channels
        self._meetings = meetings

    def send(self, target: int, name: str, value: Any) -> None:
        self._channels[self._rank, target].put((name, value))

    def receive(self, source: int, name: str) -> Any:
        sent, value = self._channels[source, self._rank].get()
        if sent != name:
            raise RuntimeError(f"rank {self._rank} waits for '{name}' from rank {source}, which sent '{sent}'")
        return value

    def reduce(
        self, ranks: Sequence[int], names: Sequence[str], parts: Any, accumulate: Callable[[Any, Any], None]
    ) -> Any:
        group = tuple(ranks)
        # Made by whoever comes first: dict.setdefault is atomic.
        meeting = self._meetings.get(group) or self._meetings.setdefault(group, Meeting(group))
        return meeting.reduce(self._rank, names, parts, accumulate)


def connect(ranks: int) -> list[LocalTransport]:
    """The ends of a new set of channels, one a rank."""
    channels: Channels = {(source, target): SimpleQueue() for source in range(ranks) for target in range(ranks)}
    meetings: dict[tuple[int, ...], Meeting] = {}
    return [LocalTransport(rank, channels, meetings) for rank in range(ranks)]
