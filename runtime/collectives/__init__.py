"""How values get from rank to rank."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

from splitc.runtime.steps import Reduce


class Transport(Protocol):
    """One rank's end of the channels to all others. A channel between two ranks keeps its order."""

    def leave(self) -> None:
        """The rank's thread ends."""

    def join(self, group: Sequence[int]) -> Any:
        """What engines of these ranks exchange values with while they run; all of them call this at the same time."""

    def abort(self, error: BaseException) -> None:
        """Let no rank wait any more: all that waits, now or later, gets a Failure."""

    def send(self, target: int, name: str, value: Any) -> None:
        """Hand `value` to the rank `target`. Does not wait for it to be taken."""

    def receive(self, source: int, name: str) -> Any:
        """The next value from the rank `source`, which must be the one called `name`; waits for it."""

    def reduce(self, step: Reduce, parts: Any, accumulate: Callable[[str, Any, Any], None]) -> Any:
        """What comes of the parts that all ranks of the step hand in, each a list of as many as it names.

        They are brought together in the order of the ranks, so the bits are the same each time. Parts may be
        overwritten, and the results are shared: nobody may write to them. A rank that hands in something else than a
        list has failed; all get that instead.
        """
