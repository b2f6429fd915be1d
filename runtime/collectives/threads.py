"""What connects ranks that are threads of one process."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from queue import SimpleQueue
from typing import Any

from splitc.runtime.arrays.array import OPERATIONS
from splitc.runtime.arrays.ort_values import host_array
from splitc.runtime.collectives import Label
from splitc.runtime.collectives.collectives import Collectives
from splitc.runtime.collectives.mail import hear_labelled, tell_all
from splitc.runtime.collectives.meeting import Meeting
from splitc.runtime.engines import Backend
from splitc.runtime.package.steps import Reduce
from splitc.runtime.threads.failures import Failure, attempt, first_failure


class _Meetings(dict[tuple[int, ...], Meeting]):
    """The meetings of groups: each is made when its first rank asks for it."""

    def __missing__(self, group: tuple[int, ...]) -> Meeting:
        return self.setdefault(group, Meeting(len(group)))  # which is atomic: the first one is everybody's


class Hub:
    """The shared objects of a session's ranks: a queue from each rank to each, the meetings, and the failure."""

    def __init__(self, ranks: int) -> None:
        self.queues: dict[tuple[int, int], SimpleQueue[tuple[Label, Any] | Failure]] = {
            (source, target): SimpleQueue() for source in range(ranks) for target in range(ranks)
        }
        self.meetings = _Meetings()
        self.failure: Failure | None = None

    def abort(self, error: BaseException) -> None:
        """End all waits: every rank that waits, now or later, gets a Failure."""
        self.failure = Failure(error)  # first: who has not seen it waits for a queue, and finds it there
        for queue in self.queues.values():
            queue.put(self.failure)
        for meeting in list(self.meetings.values()):
            meeting.abort()


class ThreadMail:
    """The mail of one rank: see Mail. Values are passed on as they are."""

    def __init__(self, rank: int, hub: Hub) -> None:
        self._rank, self._hub = rank, hub

    def tell(self, target: int, label: Label, value: Any) -> None:
        self._hub.queues[self._rank, target].put((label, value))

    def hear(self, source: int) -> tuple[Label, Any] | Failure:
        return self._hub.failure or self._hub.queues[source, self._rank].get()


class ThreadCollectives(Collectives):
    """The end of one rank. In a sum, the first rank reduces all parts into its own, while the others wait."""

    def all_reduce(self, step: Reduce, parts: Any) -> Any:
        first, *others = step.ranks
        if self.rank != first:
            tell_all(self._mail, self.rank, [first], parts, self._label)
            return hear_labelled(self._mail, self.rank, first, self._label)
        heard = [parts, *(hear_labelled(self._mail, first, other, self._label) for other in others)]
        wholes = first_failure(heard) or attempt(partial(_accumulate, step.operation, *heard))
        tell_all(self._mail, first, others, wholes, self._label)
        return wholes


def _accumulate(operation: str, totals: Sequence[Any], *others: Sequence[Any]) -> Sequence[Any]:
    """Reduce values of CPU devices into the first rank's, in place."""
    for parts in others:
        for total, part in zip(totals, parts, strict=True):
            OPERATIONS[operation](host_array(total), host_array(part), out=host_array(total))
    return totals


def connect(hub: Hub, backends: Sequence[Backend]) -> list[ThreadCollectives]:
    """The ends of ranks with these backends, connected with each other."""
    return [
        ThreadCollectives(rank, len(backends), ThreadMail(rank, hub), hub.meetings, backend, by_nccl=False)
        for rank, backend in enumerate(backends)
    ]
