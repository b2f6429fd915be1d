"""The interface of a split mode. To add one, write a module here with a `MODE`, and add it to the table."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx_ir as ir

from splitc.compiler.analysis.facts import Analysis
from splitc.compiler.inference.shapes import BoundShapes
from splitc.compiler.planning.plan import Plan
from splitc.compiler.planning.plan_file import PlanFile
from splitc.compiler.planning.resources import Resources
from splitc.compiler.planning.stage_search import Assignment
from splitc.compiler.request.request import Request
from splitc.compiler.sharding.axis_map import probe_sizes
from splitc.runtime.hardware.devices import Device


@dataclass(frozen=True)
class Way:
    """One way to use devices: their number, the number of stages, and of `groups` that each have the whole model."""

    devices: int
    stages: int = 1
    groups: int = 1

    @property
    def size(self) -> int:
        """The number of devices in a stage."""
        return self.devices // self.groups // self.stages


@dataclass(frozen=True)
class WholeValues:
    """What `Split`s have in common in modes whose ranks have only whole values."""

    analysis: Analysis
    fixes_ranks = False

    @property
    def probe_shapes(self) -> BoundShapes:
        return probe_sizes(self.analysis)

    def places(self, value: ir.Value, part: int) -> Mapping[int, npt.NDArray[np.int64]]:
        return {}

    def is_partial(self, value: ir.Value) -> bool:
        return False

    def axis_splits(self) -> None:
        return None

    def file_fields(self) -> Mapping[str, Any]:
        return {}


@dataclass(frozen=True)
class Mode:
    """The functions of a mode.

    - `ways`: the ways that auto mode tries, for the numbers of devices on each host, and the numbers of devices to try.
    - `plan`: makes a plan. Raises CannotSplitError if the mode can't split the model, MisuseError for a request that it
      can't fulfil, DoesNotFitError if the devices can't hold the model.
    - `replan`: makes the plan that a plan file describes, from the assignments of its blocks. Raises as `plan` does.
    - `stages`: the number of stages for a request and a number of devices.
    - `groups`: the number of groups of devices, each with the whole model, for a request.
    """

    ways: Callable[[Sequence[int], Sequence[int]], Sequence[Way]]
    plan: Callable[[Analysis, Resources, Request], Plan]
    replan: Callable[[Analysis, Resources, Request, PlanFile, Sequence[Assignment]], Plan]
    stages: Callable[[Request, int], int] = lambda request, devices: request.pipeline_stages
    groups: Callable[[Request, Sequence[Device]], int] = lambda request, devices: request.batch_groups
