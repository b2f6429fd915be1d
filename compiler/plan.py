"""Plan: who holds what, before anything is built."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import onnx_ir as ir

from splitc.compiler.analysis import Analysis
from splitc.compiler.memory import StageMemory
from splitc.compiler.shapes import AskedShapes, Shape
from splitc.compiler.split.layer import Stage
from splitc.compiler.split.report import SplitWeight
from splitc.compiler.split.tensor import TensorSplit
from splitc.runtime.devices import Device

DEFAULT_HEADROOM = 1 << 30


@dataclass(frozen=True)
class Repeated:
    """What a stage computes again although an earlier one has it, since that is cheaper than to send it.

    The price is `flops` a run and `weights` bytes held twice; what is saved is `unsent` bytes a run.
    """

    nodes: int
    flops: int
    weights: int
    unsent: int


@dataclass(frozen=True)
class RankPlan:
    """One rank: its device, the bytes that it may use (None: unknown), its stage, and what that is predicted to hold.

    Ranks with the same stage share it by tensor split, each with its own `part`, counted from 0, and a size by its
    `share` of the group's shares. `seconds` is the stage's time a run, measured or, as a rule, estimated.
    """

    device: Device
    budget: int | None
    share: float
    stage: Stage
    part: int
    memory: StageMemory
    seconds: float
    repeated: Repeated

    @property
    def missing(self) -> int:
        """The bytes that it lacks; 0 where it fits, and where its budget is not known."""
        return 0 if self.budget is None else max(0, self.memory.total - self.budget)


@dataclass(frozen=True)
class CutPlan:
    """What crosses from the stages before a cut to those after it, and its bytes."""

    values: tuple[ir.Value, ...]
    bytes: int


@dataclass(frozen=True)
class Plan:
    """The decisions for one model: its ranks in pipeline order, the cuts between them, and what a user should know."""

    analysis: Analysis
    split_mode: str
    engine: str
    objective: str
    profiled: bool
    ranks: tuple[RankPlan, ...]
    cuts: tuple[CutPlan, ...]
    warnings: tuple[str, ...]
    tensor: TensorSplit | None = None
    weights: tuple[SplitWeight, ...] = ()

    @property
    def stages(self) -> tuple[Stage, ...]:
        """The stages in pipeline order."""
        return tuple(rank.stage for rank in self.ranks if rank.part == 0)


@dataclass(frozen=True)
class Request:
    """What a user asks of a plan.

    `engine` is the kind of engines; None takes what the devices have. `shapes` are the inputs' to plan for; the other
    three give the ends of a range of them, and the shape to be fast for.
    `tensor_split` gives the devices' shares of the weights on any scale. `memory` is budgets as the command line takes
    them (`4GiB`, `cpu0=4GiB`); without, a device's budget is its free memory less `headroom` bytes. `spread` gives
    every device a stage, even where fewer would do. `profile` measures blocks on the device instead of estimating.
    In tensor mode `pipeline_stages` divides the devices into so many groups, each with a run of blocks.
    """

    split_mode: str = "layer"
    objective: str = "throughput"
    engine: str | None = None
    shapes: Mapping[str, Shape] | None = None
    min_shapes: Mapping[str, Shape] | None = None
    opt_shapes: Mapping[str, Shape] | None = None
    max_shapes: Mapping[str, Shape] | None = None
    tensor_split: Sequence[float] | None = None
    memory: Sequence[str] = ()
    headroom: int = DEFAULT_HEADROOM
    spread: bool = False
    profile: bool = False
    threads: int | None = None
    pipeline_stages: int = 1

    @property
    def asked_shapes(self) -> AskedShapes:
        """All that it says of shapes."""
        given = (self.shapes, self.min_shapes, self.opt_shapes, self.max_shapes)
        return AskedShapes(*(each or {} for each in given))


def plan_warnings(analysis: Analysis, ranks: Sequence[RankPlan]) -> list[str]:
    """What makes the plan's numbers less than certain."""
    found = []
    if uncertain := sorted(analysis.costs.bound.uncertain):
        found.append(
            f"the sizes of {len(uncertain)} values depend on data ({uncertain[0]}, ...): memory and time are too low"
        )
    if unknown := [str(rank.device) for rank in ranks if rank.budget is None]:
        found.append(
            f"nothing was checked against a budget for {', '.join(dict.fromkeys(unknown))}: this machine has no such "
            f"device, so give its memory, as in --memory {unknown[0]}=40GiB"
        )
    for number, rank in enumerate(ranks):
        if rank.missing > 0:
            found.append(f"rank {number} needs more than the budget of {rank.device}")
    return found
