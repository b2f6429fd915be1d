"""The interface that all split modes implement: what a mode decides for a model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import onnx_ir as ir

from splitc.compiler.inference.shapes import BoundShapes
from splitc.compiler.planning.clock import Clock, Prediction
from splitc.compiler.planning.rank_plan import CutPlan, RankPlan
from splitc.compiler.sharding.report import AxisSplit
from splitc.runtime.package.manifest import Part, Sizes
from splitc.runtime.package.steps import Step


@dataclass(frozen=True)
class RankProgram:
    """What one rank loads and runs: its graphs, each of which becomes an engine, and its steps.

    - `inputs`: taken from the caller. `outputs`: given to the caller.
    - `parts`: describe the inputs and outputs of which the rank has only a shard.
    - `keeps`: outputs that it keeps for its states, while another rank gives them to the caller.
    - `sizes`: for each graph, the ranges of its input sizes, for engines that are built for them.
    - `group`: the ranks with which engines exchange values while they run.
    """

    graphs: tuple[ir.Graph, ...]
    steps: tuple[Step, ...]
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    parts: tuple[Part, ...] = ()
    keeps: tuple[str, ...] = ()
    sizes: tuple[dict[str, Sizes], ...] = ()
    group: tuple[int, ...] = ()


class Split(Protocol):
    """How the ranks of a plan share a model."""

    @property
    def probe_shapes(self) -> BoundShapes:
        """Shapes with distinct probe sizes, to check a package with."""

    @property
    def rewrites(self) -> bool:
        """Whether rank graphs compute differently from the model, so that a package must be compared with it."""

    @property
    def fixes_ranks(self) -> bool:
        """Whether inputs of unknown rank (number of axes) are only accepted with the planned rank."""

    @property
    def whole(self) -> str:
        """Where weights that are not split are held, for messages."""

    @property
    def collectives(self) -> int:
        """The number of collectives in a run."""

    def exchanged(self, cuts: Sequence[CutPlan]) -> list[int]:
        """The bytes of each value that collectives exchange in a run."""

    def more_sessions(self, rank: RankPlan, inside: bool) -> int:
        """The number of engines of the rank beyond its first. `inside`: collectives may be inside engines."""

    def predict(self, ranks: Sequence[RankPlan], cuts: Sequence[CutPlan], clock: Clock) -> Prediction:
        """The predicted seconds of a request, and between the outputs of a stream."""

    def program(self, ranks: Sequence[RankPlan], number: int, engine: str) -> RankProgram:
        """The graphs and steps of rank `number`, for this kind of engine."""

    def places(self, value: ir.Value, part: int) -> Mapping[int, npt.NDArray[np.int64]]:
        """The indices of the elements of a value that rank `part` of its group has, along each sharded axis."""

    def is_partial(self, value: ir.Value) -> bool:
        """Whether each rank of a group has only a summand of a value."""

    def axis_splits(self) -> Sequence[AxisSplit] | None:
        """The axes of weights, and whether they are sharded; None if the mode does not use axes."""

    def file_fields(self) -> Mapping[str, Any]:
        """Fields of plan.json that describe the split beyond its ranks, by name."""
