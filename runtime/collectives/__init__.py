"""How values get from rank to rank."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from splitc.runtime.steps import Reduce


class Exchange(Protocol):
    """What a rank's program needs: its end of the channels to all other ranks. A channel keeps its order."""

    def send(self, target: int, name: str, value: Any) -> None:
        """Hand `value` to the rank `target`. Does not wait for it to be taken."""

    def receive(self, source: int, name: str) -> Any:
        """The next value from the rank `source`, which must be the one called `name`; waits for it."""

    def all_reduce(self, step: Reduce, parts: Any, accumulate: Callable[[str, Any, Any], None]) -> Any:
        """What comes of the parts that all ranks of the step hand in, each a list of as many as it names.

        They are brought together in the order of the ranks, so the bits are the same each time. Parts may be
        overwritten, and the results are shared: nobody may write to them. A rank that hands in a Failure has failed;
        all get that instead.
        """


class Collectives(Exchange, Protocol):
    """One rank's end of all that the ranks of a session do together.

    `rank` is its number. `capturable` says that all of it can be captured as a CUDA graph: the values of all ranks stay
    on GPUs that have access to each other's memory. `by_host` are pairs of GPUs of which the first's arrays go to the
    second through the host, since copies between them come out wrong.
    """

    @property
    def rank(self) -> int: ...

    @property
    def capturable(self) -> bool: ...

    @property
    def by_host(self) -> frozenset[tuple[int, int]]: ...

    def all_gather(self, ranks: Sequence[int], value: Any) -> Any:
        """What these ranks hand in, a list in their order, once all have done so; or the Failure that one handed in.

        The values are Python objects, which are handed on as they are.
        """

    def abort(self, error: BaseException) -> None:
        """Let no rank wait any more: all that waits, now or later, gets a Failure."""

    def close(self) -> None:
        """The rank's thread ends: let go of what it has."""


class CommunicatorMaker(ABC):
    """Collectives that can also connect engines, which then exchange values while they run."""

    @abstractmethod
    def create_communicator(self, group: Sequence[int]) -> Any:
        """What engines of these ranks exchange values by; all ranks of the group call this at the same time.

        Raises PackageError where the library is missing, and what another rank of the group failed with.
        """
