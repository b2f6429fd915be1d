"""How values get from rank to rank."""

from __future__ import annotations

from typing import Any, Protocol


class Transport(Protocol):
    """One rank's end of the channels to all others. A channel between two ranks keeps its order."""

    def send(self, target: int, name: str, value: Any) -> None:
        """Hand `value` to the rank `target`. Does not wait for it to be taken."""

    def receive(self, source: int, name: str) -> Any:
        """The next value from the rank `source`, which must be the one called `name`; waits for it."""
