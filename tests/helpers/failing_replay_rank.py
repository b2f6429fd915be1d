"""The process of a rank on a simulated GPU, in which rank 0's replays fail."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from splitc.runtime.errors import EngineError
from splitc.runtime.ranks.replays import RankReplays
from splitc.runtime.ranks.request import InFlightRequest
from tests.helpers import fake_rank


def main(descriptor: int) -> None:
    """As `splitc.runtime.processes.rank.main`."""
    play = RankReplays.play

    def fail(self: RankReplays, request: InFlightRequest, drain: Callable[[], None]) -> Any:
        if self._computation.collectives.rank == 0:
            raise EngineError("a replay failed on purpose")
        return play(self, request, drain)

    RankReplays.play = fail  # type: ignore[assignment]
    fake_rank.main(descriptor)
