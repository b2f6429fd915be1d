"""How ranks exchange values: what each value is called, and what a rank's program uses."""

from __future__ import annotations

from typing import Any, Protocol

from splitc.runtime.package.steps import Reduce

# Identifies a value: the number of its request, and its name, if it has one.
Label = tuple[int, str | None]
# The label of values before all requests.
LOADING: Label = (-1, None)


class Exchange(Protocol):
    """A rank's connections to all other ranks, for its program. Values from one rank arrive in order."""

    def send(self, target: int, name: str, value: Any) -> None:
        """Send `value` to the rank `target`. Does not wait for it to be received."""

    def receive(self, source: int, name: str) -> Any:
        """Wait for the next value from the rank `source`. It must have this name."""

    def all_reduce(self, step: Reduce, parts: Any) -> Any:
        """Reduce the parts of all ranks of the step. Each rank passes one part for each name in the step.

        Parts are reduced in the order of the ranks, so the result has the same bits each time. Parts may be
        overwritten. The results may be shared, and must not be written to. If a rank passes a Failure, all ranks get
        that instead.
        """
