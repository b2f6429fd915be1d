"""How ranks exchange values: send, receive, all-reduce, all-gather."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

from splitc.runtime.engines import Communicator
from splitc.runtime.errors import HandOverError
from splitc.runtime.package.steps import Reduce

# Identifies a value: the number of its request, and its name, if it has one.
Label = tuple[int, str | None]
# The label of values before all requests.
LOADING: Label = (-1, None)


def check_label(sent: Label, wanted: Label, rank: int, source: int) -> None:
    """Raise HandOverError unless a rank has sent what another one waits for: they may have got different requests."""
    if sent != wanted:
        raise HandOverError(
            f"rank {rank} waits for {_words(wanted)} from rank {source}, which sent {_words(sent)}: they are out of "
            "step"
        )


def _words(label: Label) -> str:
    request, name = label
    return f"'{name or ''}' of request {request}"


class Exchange(Protocol):
    """A rank's connections to all other ranks, as its program needs them. Values from one rank come in order."""

    def send(self, target: int, name: str, value: Any) -> None:
        """Send `value` to the rank `target`. Does not wait for it to be received."""

    def receive(self, source: int, name: str) -> Any:
        """Wait for the next value from the rank `source`, which must have this name."""

    def all_reduce(self, step: Reduce, parts: Any, accumulate: Callable[[str, Any, Any], None]) -> Any:
        """Reduce the parts of all ranks of the step. Each rank gives a list with one part for each name in the step.

        Parts are reduced in the order of the ranks, so the result has the same bits each time. Parts may be
        overwritten. The results are shared, so nobody may write to them. If a rank gives a Failure, all ranks get that
        instead.
        """


class Collectives(Exchange, Protocol):
    """One rank's end of all collectives of a session. `rank` is its number."""

    @property
    def rank(self) -> int: ...

    def begin(self, request: int) -> None:
        """What is exchanged from now on belongs to the request of this number, by which all ranks know it.

        A rank that receives a value of another request raises HandOverError.
        """

    def all_gather(self, ranks: Sequence[int], value: Any) -> Any:
        """Wait for a value of each of these ranks. Returns them in order, or the Failure that one of them gave.

        The values are Python objects, which are passed on as they are.
        """

    def create_communicator(self, group: Sequence[int], uses_operators: bool) -> Communicator:
        """A communicator for engines of these ranks. All ranks of the group must call this at the same time.

        `uses_operators` says that the collectives inside are operators of splitc's own.

        Raises PackageError if the library is missing, and the error of any other rank of the group.
        """
