"""A rank's process on a GPU that is not there: rank 0 can't replay what it could be given."""

from __future__ import annotations

from typing import Any

from splitc.runtime.errors import EngineError
from splitc.runtime.ranks.computation import Computation
from splitc.runtime.ranks.replays import RankReplays
from tests.helpers import fake_rank


def main(descriptor: int) -> None:
    """As `splitc.runtime.processes.rank.main`."""
    play = RankReplays.play

    def fail(self: RankReplays, computation: Computation, *args: Any) -> Any:
        if computation.collectives.rank == 0:
            raise EngineError("a replay failed on purpose")
        return play(self, computation, *args)

    RankReplays.play = fail  # type: ignore[assignment]
    fake_rank.main(descriptor)
