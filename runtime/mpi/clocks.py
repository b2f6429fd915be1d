"""Times of other machines, converted to this machine's clock: each clock began at another time."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Sequence

import msgspec

from splitc.runtime.processes.messages import Answer

# The recent answers of a machine that count: clocks drift, so old answers say little. A choice: with fewer, none of
# them may have come without delay.
RECENT = 64


class Clocks:
    """The clocks of the ranks' machines. `machines` has the number of each rank's machine; the caller's is 0.

    The clocks' offset is taken from the recent answer of a machine with the shortest transit. Converted times are too
    late by that transit.
    """

    def __init__(self, machines: Sequence[int]) -> None:
        self._machines = machines
        self._apart: defaultdict[int, deque[float]] = defaultdict(lambda: deque(maxlen=RECENT))

    def by_ours(self, rank: int, answer: Answer, arrived: float) -> Answer:
        """A rank's answer with its times by our clock. It arrived at the time `arrived` of our clock."""
        machine = self._machines[rank]
        if machine == 0:
            return answer
        apart = self._apart[machine]
        apart.append(arrived - answer.end)
        more = min(apart)
        spans = tuple((step, start + more, end + more) for step, start, end in answer.spans)
        return msgspec.structs.replace(answer, start=answer.start + more, end=answer.end + more, spans=spans)
