"""How one rank tells others what it does with a request, if they can't see it themselves."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum

from splitc.runtime.manifest import Manifest, is_fed
from splitc.runtime.ranks.thread import Worker


class Act(IntEnum):
    """What a rank does with a request."""

    EAGER = 0
    RECORD = 1
    REPLAY = 2


@dataclass(frozen=True)
class Lead:
    """The ranks of a `group` whose engines meet, the first of which tells those at the places `led` what it does."""

    group: tuple[int, ...]
    led: tuple[int, ...]

    def tell(self, worker: Worker, act: Act, number: int, kept: Sequence[int]) -> None:
        """Tell what is done with the request, the number of its recording, and the numbers of those that are kept."""
        for place in self.led:
            worker.communicator(self.group).tell(place, [act, number, *kept])

    def hear(self, worker: Worker) -> tuple[Act, int, list[int]]:
        """What the first rank tells this one."""
        act, number, *kept = worker.communicator(self.group).hear(0)
        return Act(act), number, kept


def find_lead(manifest: Manifest, number: int) -> Lead | None:
    """The lead of a rank's group, if its engines meet and some of them are fed nothing; None otherwise."""
    group = next((tuple(file.group) for file in manifest.ranks[number].engines if file.group), ())
    led = tuple(place for place, rank in enumerate(group) if place and not is_fed(manifest.ranks[rank]))
    return Lead(group, led) if led else None
