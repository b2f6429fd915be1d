"""Plan: who holds what, before anything is built."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from splitc.compiler.analysis.facts import Analysis
from splitc.compiler.analysis.stages import Stage
from splitc.compiler.planning.rank_plan import CutPlan, RankPlan
from splitc.compiler.planning.split import RankProgram, Split
from splitc.compiler.sharding.report import WeightFate


@dataclass(frozen=True)
class Alternative:
    """One way to use the devices that auto mode tried: seconds a request, and between the outputs of a stream.

    `fullest` is the share of its budget that the fullest device holds at its peak, in bytes where a budget is not
    known; `peaks` are all devices' peaks in bytes. What can't be has `refused`, the reason, instead.
    """

    name: str
    mode: str
    devices: int
    latency: float = 0.0
    interval: float = 0.0
    fullest: float = 0.0
    peaks: Sequence[int] = ()
    refused: str | None = None


@dataclass(frozen=True)
class Plan:
    """The decisions for one model: its ranks in pipeline order, the cuts between them, and what a user should know.

    `split` says how the ranks share the model, `weights` what becomes of each weight where that is not as in the model.
    In auto mode `alternatives` are what was compared, and `choice` says what was chosen of them and why.
    """

    analysis: Analysis
    split_mode: str
    split: Split
    engine: str
    objective: str
    profiled: bool
    ranks: tuple[RankPlan, ...]
    cuts: tuple[CutPlan, ...]
    weights: tuple[WeightFate, ...] = ()
    warnings: tuple[str, ...] = ()
    alternatives: tuple[Alternative, ...] = ()
    choice: str | None = None

    @property
    def stages(self) -> tuple[Stage, ...]:
        """What each group of ranks runs, in pipeline order."""
        return tuple(rank.stage for rank in self.ranks if rank.part == 0)

    def program(self, number: int) -> RankProgram:
        """The graphs and steps of a rank."""
        return self.split.program(self.ranks, number, self.engine)
