"""When other machines did something, by this machine's clock: each has its own, which began at another time."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Sequence

import msgspec

from splitc.runtime.processes.messages import Answer

# Answers of a machine that count: clocks drift, and an old answer says little of how they are now.
RECENT = 64


class Clocks:
    """The clocks of the machines that ranks run on: `machines` has the number of each rank's, the caller's first.

    An answer arrives after its end. Of a machine's recent answers, that which arrived soonest shows how far the clocks
    are apart: times are too late by what this one took on its way.
    """

    def __init__(self, machines: Sequence[int]) -> None:
        self._machines = machines
        self._apart: defaultdict[int, deque[float]] = defaultdict(lambda: deque(maxlen=RECENT))

    def by_ours(self, rank: int, answer: Answer, arrived: float) -> Answer:
        """A rank's answer, which arrived at this time of our clock, with its times by our clock."""
        machine = self._machines[rank]
        if machine == self._machines[0]:
            return answer
        apart = self._apart[machine]
        apart.append(arrived - answer.end)
        more = min(apart)
        spans = tuple((step, start + more, end + more) for step, start, end in answer.spans)
        return msgspec.structs.replace(answer, start=answer.start + more, end=answer.end + more, spans=spans)
