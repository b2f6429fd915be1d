"""A plan's entries for a rank, and for a cut between ranks."""

from __future__ import annotations

from dataclasses import dataclass

import onnx_ir as ir

from splitc.compiler.analysis.memory import StageMemory
from splitc.compiler.analysis.stages import Stage
from splitc.compiler.planning.resources import Budget
from splitc.runtime.hardware.devices import Device

# The bytes of the first three regions that an arena takes from the system, which are not full.
FIRST_REGIONS = 7 << 20


@dataclass(frozen=True)
class Rematerialized:
    """The nodes of earlier stages that a stage recomputes, since that is cheaper than to send their results.

    It costs `flops` operations per run and `weights` bytes that are held twice. It saves `unsent` bytes per run.
    """

    nodes: int = 0
    flops: int = 0
    weights: int = 0
    unsent: int = 0


@dataclass(frozen=True)
class RankPlan:
    """One rank: its device, its budget in bytes (None: unknown), its stage, and its predicted memory.

    - `group`: ranks of a group share a stage. `part`: the rank's number in its group. `share`: its share of the stage.
      In row mode rank 0 has the whole model, and the others the products that they have a slice of.
    - `seconds`: the time per run, measured with --profile, otherwise estimated.
    - `replica`: the number of its copy of the model, if there are several.
    - `limited`: its budget was asked for, and is not just the free memory.
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
    replica: int = 0
    limited: bool = False

    @property
    def limit(self) -> Budget:
        """The bytes that each of its engines may take for weights and values; None unless a budget was asked for.

        Planned sizes must run, although the prediction is only within 10 percent: so there is at least that much in any
        case.
        """
        planned = self.memory.values
        return None if self._spare is None else planned + max(self._spare, planned // 10 + FIRST_REGIONS)

    @property
    def sums_limit(self) -> Budget:
        """The bytes that it may take for A and B of all held adapter sums; None as for `limit`."""
        return None if self._spare is None else self.memory.sums + max(self._spare, 0)

    @property
    def _spare(self) -> Budget:
        """The rest of a budget for larger requests. Those with adapters, adapter sums and other requests share it."""
        if not self.limited or self.budget is None:
            return None
        return (self.budget - self.memory.total) // (3 if self.memory.sums else 1)

    @property
    def missing(self) -> int:
        """The bytes by which it exceeds its budget; 0 if it fits or if the budget is not known."""
        return 0 if self.budget is None else max(0, self.memory.total - self.budget)


@dataclass(frozen=True)
class CutPlan:
    """The values that cross from the stages before a cut to those after it, and their bytes.

    In row mode there is one for each rank except the main one: the values that cross between the two, in both
    directions. With `detour` they cross in both directions between the rank after the cut and all others.
    """

    values: tuple[ir.Value, ...]
    bytes: int
    detour: bool = False
