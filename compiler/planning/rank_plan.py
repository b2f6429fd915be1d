"""What a plan says of one rank, and of what crosses between ranks."""

from __future__ import annotations

from dataclasses import dataclass

import onnx_ir as ir

from splitc.compiler.analysis.memory import StageMemory
from splitc.compiler.analysis.stages import Stage
from splitc.compiler.planning.resources import Budget
from splitc.runtime.devices import Device


@dataclass(frozen=True)
class Rematerialized:
    """What a stage computes again although an earlier one has it, since that is cheaper than to send it.

    The price is `flops` a run and `weights` bytes held twice; what is saved is `unsent` bytes a run.
    """

    nodes: int = 0
    flops: int = 0
    weights: int = 0
    unsent: int = 0


@dataclass(frozen=True)
class RankPlan:
    """One rank: its device, its budget in bytes (None: unknown), its stage, and what that is predicted to hold.

    Ranks of one `group` share a stage, each with its own `part`, counted from 0, and a size by its `share` of the
    group's shares. By row the first has all of the model, and the others the products of which they have a slice.
    `seconds` is the time a run, measured or, as a rule, estimated.
    """

    device: Device
    budget: Budget
    share: float
    stage: Stage
    group: int
    part: int
    memory: StageMemory
    seconds: float
    rematerialized: Rematerialized = Rematerialized()

    @property
    def missing(self) -> int:
        """The bytes that it lacks; 0 where it fits, and where its budget is not known."""
        return 0 if self.budget is None else max(0, self.memory.total - self.budget)


@dataclass(frozen=True)
class CutPlan:
    """What crosses from the stages before a cut to those after it, and its bytes.

    By row there is one for each rank but the main one: what crosses between the two, both ways.
    """

    values: tuple[ir.Value, ...]
    bytes: int
