"""What a split mode decides for a model: the one interface behind which the modes differ."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import onnx_ir as ir

from splitc.compiler.frontend.shapes import BoundShapes
from splitc.compiler.planning.clock import Clock, Prediction
from splitc.compiler.planning.rank_plan import CutPlan, RankPlan
from splitc.compiler.sharding.axis_map import AxisMap
from splitc.compiler.sharding.report import AxisFate
from splitc.runtime.manifest import Part, Sizes
from splitc.runtime.steps import Step


@dataclass(frozen=True)
class RankProgram:
    """What one rank loads and runs: its graphs, each of which becomes an engine, and its steps.

    `inputs` and `outputs` are those that it takes from and gives to the caller, `parts` say of which of these it has a
    shard only. `keeps` are outputs that it has for its states while another rank gives them. `sizes` are, for each
    graph, those of its inputs, where engines are built for them.
    """

    graphs: tuple[ir.Graph, ...]
    steps: tuple[Step, ...]
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    parts: tuple[Part, ...] = ()
    keeps: tuple[str, ...] = ()
    sizes: tuple[dict[str, Sizes], ...] = ()


class Split(Protocol):
    """How the ranks of a plan share a model."""

    @property
    def axis_map(self) -> AxisMap:
        """The axes of the whole model, found with distinct probe sizes."""

    @property
    def probe_shapes(self) -> BoundShapes:
        """Shapes with distinct probe sizes, on which a package is tried."""

    @property
    def rewrites(self) -> bool:
        """Whether ranks compute otherwise than the model does, so that a package must be compared with it."""

    @property
    def fixes_ranks(self) -> bool:
        """Whether an input of unknown rank is taken with the rank that was planned for, and no other."""

    @property
    def is_radial(self) -> bool:
        """Whether values cross between the first rank and each other one, and not from stage to stage."""

    @property
    def collectives(self) -> int:
        """How many times a run the ranks bring together what they have."""

    def exchanged_bytes(self, cuts: Sequence[CutPlan]) -> int:
        """Bytes of what they bring together in a run."""

    def more_sessions(self, rank: RankPlan) -> int:
        """How many engines the rank has beside its first one, where engines have no collectives inside."""

    def predict(self, ranks: Sequence[RankPlan], cuts: Sequence[CutPlan], clock: Clock) -> Prediction:
        """The time of a request and of a stream."""

    def program(self, ranks: Sequence[RankPlan], number: int, engine: str) -> RankProgram:
        """The graphs and steps of the rank of this number, for engines of this kind."""

    def axis_fates(self) -> Sequence[AxisFate] | None:
        """The axes that reach weights, and whether they are sharded; None where the mode looks at none."""

    def file_fields(self) -> Mapping[str, Any]:
        """What the plan's file says of the split beside its ranks, by the names of its fields."""
