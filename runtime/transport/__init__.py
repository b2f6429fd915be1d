"""How values get from rank to rank."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol


class Transport(Protocol):
    """One rank's end of the channels to all others. A channel between two ranks keeps its order."""

    def send(self, target: int, name: str, value: Any) -> None:
        """Hand `value` to the rank `target`. Does not wait for it to be taken."""

    def receive(self, source: int, name: str) -> Any:
        """The next value from the rank `source`, which must be the one called `name`; waits for it."""

    def reduce(
        self, ranks: Sequence[int], names: Sequence[str], parts: Any, accumulate: Callable[[Any, Any], None]
    ) -> Any:
        """The sums of what all of `ranks` hand in, each a list of as many parts as there are names.

        The order of summation is that of the ranks, so the bits are the same each time. Parts may be overwritten, and
        the sums are shared: nobody may write to them. A rank that hands in something else than a list has failed; all
        get that instead.
        """
