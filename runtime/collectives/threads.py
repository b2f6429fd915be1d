"""Collectives of threads of one process, on the host: values are passed on as they are."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from queue import SimpleQueue
from typing import Any

from splitc.runtime.arrays.array import accumulate_arrays
from splitc.runtime.arrays.ort_values import host_array
from splitc.runtime.collectives import LOADING, Label, check_label
from splitc.runtime.collectives.meeting import Meeting
from splitc.runtime.engines import Communicator
from splitc.runtime.package.steps import Reduce
from splitc.runtime.threads.failures import Failure, attempt, first_failure

Queues = dict[tuple[int, int], "SimpleQueue[tuple[Label | None, Any]]"]


@dataclass
class Rendezvous:
    """A meeting point of a group's threads. The last rank to arrive computes the result for all."""

    ranks: Sequence[int]
    lock: threading.Lock = field(default_factory=threading.Lock)
    values: dict[int, tuple[Label, Any]] = field(default_factory=dict)
    results: dict[int, SimpleQueue[Any]] = field(default_factory=dict)
    aborted: Failure | None = None

    def __post_init__(self) -> None:
        self.results = {rank: SimpleQueue() for rank in self.ranks}

    def meet(self, rank: int, label: Label, value: Any, combine: Callable[[list[Any]], Any]) -> Any:
        """The result of `combine` on all values in the order of the ranks; or the first Failure among them.

        All must pass the same label.
        """
        with self.lock:
            if self.aborted is not None:
                return self.aborted
            self.values[rank] = label, value
            last = len(self.values) == len(self.ranks)
            if last:
                handed_in, self.values = self.values, {}
        if last:
            for other, (sent, _) in handed_in.items():
                check_label(sent, label, rank, other)
            ordered = [handed_in[other][1] for other in self.ranks]
            result = first_failure(ordered) or attempt(lambda: combine(ordered))
            for other in self.ranks:
                self.results[other].put(result)
        return self.results[rank].get()

    def abort(self, failure: Failure) -> None:
        with self.lock:
            self.aborted = failure
        for results in self.results.values():
            results.put(failure)


@dataclass
class Hub:
    """The shared objects of a session's ranks: queues between all pairs, a rendezvous for each group, the failure.

    `accumulate` reduces a part into another one in place, by the operation of a Reduce step.
    """

    queues: Queues
    accumulate: Callable[[str, Any, Any], None]
    rendezvous: dict[tuple[int, ...], Rendezvous] = field(default_factory=dict)
    meetings: dict[tuple[int, ...], Meeting] = field(default_factory=dict)
    failure: Failure | None = None


class ThreadCollectives:
    """The end of one rank, on a CPU device."""

    def __init__(self, rank: int, hub: Hub) -> None:
        self.rank = rank
        self.hub = hub
        self._label = LOADING

    def begin(self, request: int) -> None:
        self._label = request, None

    def send(self, target: int, name: str, value: Any) -> None:
        self.hub.queues[self.rank, target].put(((self._label[0], name), value))

    def receive(self, source: int, name: str) -> Any:
        queue = self.hub.queues[source, self.rank]
        sent, value = queue.get()
        if sent is None:
            queue.put((None, value))  # for the next receiver
            return value
        check_label(sent, (self._label[0], name), self.rank, source)
        return value

    def abort(self, error: BaseException) -> None:
        """End all waits: every rank that waits, now or later, gets a Failure."""
        failure = Failure(error)
        self.hub.failure = failure
        for queue in self.hub.queues.values():
            queue.put((None, failure))
        for rendezvous in list(self.hub.rendezvous.values()):
            rendezvous.abort(failure)
        for meeting in list(self.hub.meetings.values()):
            meeting.abort()

    def create_communicator(self, group: Sequence[int], uses_operators: bool) -> Communicator:
        key = tuple(group)
        # dict.setdefault is atomic: the first rank's meeting is everybody's.
        meeting = self.hub.meetings.get(key) or self.hub.meetings.setdefault(key, Meeting(len(key)))
        return meeting.join(key.index(self.rank))

    def all_gather(self, ranks: Sequence[int], value: Any) -> Any:
        return self._meet(ranks, value, list)

    def all_reduce(self, step: Reduce, parts: Any) -> Any:
        def add_up(handed_in: list[tuple[Reduce, list[Any]]]) -> list[Any]:
            """Reduce the other ranks' parts into those of the first rank."""
            if any(other != step for other, _ in handed_in):
                raise RuntimeError(f"ranks do not reduce the same values: {[other for other, _ in handed_in]}")
            totals = handed_in[0][1]
            for _, others in handed_in[1:]:
                for total, part in zip(totals, others, strict=True):
                    self.hub.accumulate(step.operation, total, part)
            return totals

        return self._meet(step.ranks, parts if isinstance(parts, Failure) else (step, parts), add_up)

    def _meet(self, ranks: Sequence[int], value: Any, combine: Callable[[list[Any]], Any]) -> Any:
        group = tuple(ranks)
        # The first rank to come creates the rendezvous: dict.setdefault is atomic.
        rendezvous = self.hub.rendezvous.get(group) or self.hub.rendezvous.setdefault(group, Rendezvous(group))
        if self.hub.failure is not None:  # a rendezvous created after `abort` was not aborted by it
            return self.hub.failure
        return rendezvous.meet(self.rank, self._label, value, combine)


def accumulate_values(operation: str, total: Any, part: Any) -> None:
    """Reduce a value of a CPU device's engines into another one, in place, by `sum` or `max`."""
    accumulate_arrays(operation, host_array(total), host_array(part))


def connect(ranks: int, accumulate: Callable[[str, Any, Any], None] = accumulate_values) -> list[ThreadCollectives]:
    """The ends of ranks that are connected with each other. For `accumulate` see Hub."""
    hub = Hub({(source, target): SimpleQueue() for source in range(ranks) for target in range(ranks)}, accumulate)
    return [ThreadCollectives(rank, hub) for rank in range(ranks)]
