"""Times of other machines by this machine's clock: each machine's clock began at another time."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Sequence

import msgspec

from splitc.runtime.processes.messages import Answer

# The recent answers of a machine that count: clocks drift, so old answers say little. A choice: with fewer, none of
# them may have come without delay.
RECENT = 64


class Clocks:
    """The clocks of the machines that ranks run on: `machines` has the number of each rank's; the caller's is 0.

    An answer arrives after its end. Of a machine's recent answers, the one with the shortest way gives the clocks'
    offset: converted times are too late by the time that it took.
    """

    def __init__(self, machines: Sequence[int]) -> None:
        self._machines = machines
        self._apart: defaultdict[int, deque[float]] = defaultdict(lambda: deque(maxlen=RECENT))

    def by_ours(self, rank: int, answer: Answer, arrived: float) -> Answer:
        """A rank's answer, which arrived at this time of our clock, with its times by our clock."""
        machine = self._machines[rank]
        if machine == 0:
            return answer
        apart = self._apart[machine]
        apart.append(arrived - answer.end)
        more = min(apart)
        spans = tuple((step, start + more, end + more) for step, start, end in answer.spans)
        return msgspec.structs.replace(answer, start=answer.start + more, end=answer.end + more, spans=spans)
