"""The interface of a split mode. To add one, write a module here that has a `MODE`, and name it in the table."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from splitc.compiler.analysis.facts import Analysis
from splitc.compiler.planning.plan import Plan
from splitc.compiler.planning.plan_file import PlanFile
from splitc.compiler.planning.resources import Resources
from splitc.compiler.planning.stage_search import Assignment
from splitc.compiler.request.request import Request


@dataclass(frozen=True)
class Way:
    """One way to use devices: how many of them, in how many stages."""

    devices: int
    stages: int = 1

    @property
    def size(self) -> int:
        """The number of devices in a stage."""
        return self.devices // self.stages


@dataclass(frozen=True)
class Mode:
    """The functions of a mode.

    stages: the number of stages for a request and a number of devices.
    ways: the ways to try in auto mode, for the numbers of devices on each host and the numbers of devices to try.
    plan: makes a plan. Raises CannotSplitError if the mode can't split the model, MisuseError for a request that it
    can't meet, DoesNotFitError if the devices can't hold the model.
    replan: makes the plan of a file, from the assignments of its blocks. Raises as `plan` does.
    """

    stages: Callable[[Request, int], int]
    ways: Callable[[Sequence[int], Sequence[int]], Sequence[Way]]
    plan: Callable[[Analysis, Resources, Request], Plan]
    replan: Callable[[Analysis, Resources, Request, PlanFile, Sequence[Assignment]], Plan]
