"""The plan: which rank holds and runs what."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from splitc.compiler.adapters.slots import planned_rank
from splitc.compiler.analysis.facts import Analysis
from splitc.compiler.analysis.stages import Stage
from splitc.compiler.operators.registry import quantizes
from splitc.compiler.planning.clock import Prediction
from splitc.compiler.planning.rank_plan import CutPlan, RankPlan
from splitc.compiler.planning.split import RankProgram, Split
from splitc.compiler.request.request import HOST
from splitc.compiler.sharding.report import WeightSplit
from splitc.runtime.engines.kinds import ONNXRUNTIME
from splitc.runtime.files.listing import Listed, Listing
from splitc.runtime.package.manifest import Cut
from splitc.runtime.units import block_range, first_few, format_bytes, format_seconds


@dataclass(frozen=True)
class Alternative:
    """One way to use the devices that auto mode tried.

    - `latency`, `interval`: seconds of a request, and between the outputs of a stream.
    - `fullest`: the share of its budget that the fullest device holds at its peak; bytes if a budget is not known.
    - `peaks`: all devices' peaks in bytes.
    - `hosts`: their number. `placement`: how its groups lie on them.
    - `refused`: the reason why it is impossible. Then the other numbers are not set.
    """

    name: str
    mode: str
    devices: int
    latency: float = 0.0
    interval: float = 0.0
    fullest: float = 0.0
    peaks: Sequence[int] = ()
    hosts: int = 1
    placement: str = ""
    refused: str | None = None


@dataclass(frozen=True)
class Replicas:
    """Several copies of the model, each on a group of devices, which divide the rows of a request.

    - `first`: the plan of the first one. The others hold and run the same.
    - `shares`: of the rows.
    - `rows`: the number of the row axis of each input and output that has one, by name.
    - `counts`: each one's number of the planned rows.
    - `analyses`: the model's analyses with these numbers of rows.
    """

    first: Plan
    shares: tuple[float, ...]
    rows: Mapping[str, int]
    counts: tuple[int, ...]
    analyses: tuple[Analysis, ...]


@dataclass(frozen=True, repr=False)
class Plan(Listed):
    """The decisions for one model: its ranks in pipeline order, the cuts between them, and warnings.

    - `split`: how the ranks share the model.
    - `weights`: how each weight is split, in row and tensor mode.
    - `alternatives`: what auto mode compared. `choice`: which one it chose, and why.
    - `weights_at`: where CPU devices have the weights.
    - `prediction`: the times of requests on the planning machine; None for a plan from a file.
    - `replicas`: if set, the ranks are those of several copies of the model, one copy after the other.
    """

    analysis: Analysis
    split_mode: str
    split: Split
    engine: str
    objective: str
    profiled: bool
    ranks: tuple[RankPlan, ...]
    cuts: tuple[CutPlan, ...]
    weights: tuple[WeightSplit, ...] = ()
    warnings: tuple[str, ...] = ()
    alternatives: tuple[Alternative, ...] = ()
    choice: str | None = None
    replicas: Replicas | None = None
    weights_at: str = HOST
    prediction: Prediction | None = None

    @property
    def whole_weights(self) -> list[tuple[str, int, str]]:
        """The weights that are not completely split: their names, the bytes that are whole, and why."""
        return [(weight.name, weight.whole, weight.reason) for weight in self.weights if weight.reason]

    @property
    def written(self) -> Plan:
        """The plan from which the package's files are written: that of one replica, if there are several."""
        return self if self.replicas is None else self.replicas.first

    @property
    def rewrites(self) -> bool:
        """Whether the package is compared with the model.

        Ranks compute differently, rows are cut and joined, or operators are fused: for GPUs some are inside engines. Of
        quantized nodes, ONNX Runtime fuses those that an engine has side by side, so cuts change what it fuses.
        """
        on_gpus = self.engine == ONNXRUNTIME and any(rank.device.kind == "cuda" for rank in self.ranks)
        fuses = self.analysis.fuses and (
            on_gpus or any(outcome.operator is not None for outcome in self.analysis.outcomes)
        )
        parts = len(self.ranks) > 1 and any(map(quantizes, self.analysis.graph.nodes))
        return self.replicas is not None or self.split.rewrites or fuses or parts

    @property
    def groups(self) -> int:
        """The number of groups of ranks that each have the whole model."""
        return 1 if self.replicas is None else len(self.replicas.shares)

    @property
    def most_rank(self) -> int | None:
        """The highest total rank of adapter sums that may be held at once, by the budgets; None without a limit."""
        planned = planned_rank(self.analysis.slot_rank)
        limits = [(rank.sums_limit, rank.memory.sums) for rank in self.ranks if rank.memory.sums]
        return min((planned * limit // sums for limit, sums in limits if limit is not None), default=None)

    @property
    def stages(self) -> tuple[Stage, ...]:
        """The stage of each group of ranks, in pipeline order."""
        return tuple(rank.stage for rank in self.written.ranks if rank.part == 0)

    @property
    def named_cuts(self) -> list[Cut]:
        """The cuts with the names of their values."""
        return [Cut([value.name or "" for value in cut.values], cut.bytes, cut.detour) for cut in self.cuts]

    def _listing(self) -> Listing:
        devices = first_few([str(rank.device) for rank in self.ranks])
        held = format_bytes(sum(rank.memory.weights for rank in self.ranks))
        title = f"Plan of {self.analysis.graph.path.name}: {self.split_mode} mode on {devices}, {held} of weights"
        rows = []
        for number, rank in enumerate(self.ranks):
            memory = rank.memory
            sizes = map(format_bytes, (memory.weights, memory.activations, memory.cache, memory.total))
            budget = "unknown" if rank.budget is None else format_bytes(rank.budget)
            blocks = block_range([block.name for block in rank.stage.blocks])
            rows.append([f"{number} {rank.device}", blocks, *sizes, budget, format_seconds(rank.seconds)])
        columns = ("rank", "blocks", "weights", "activations", "cache", "peak", "budget", "time")
        return Listing(title, columns, rows)

    def program(self, number: int) -> RankProgram:
        """The graphs and steps of a rank. They are the same in each replica."""
        ranks = self.written.ranks
        return self.split.program(ranks, number % len(ranks), self.engine)
