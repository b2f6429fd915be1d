"""A split mode: what plans in it. To add one, write a module here that has a `MODE`, and name it in the table."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from splitc.compiler.analysis.facts import Analysis
from splitc.compiler.planning.plan import Plan
from splitc.compiler.planning.plan_file import PlanFile
from splitc.compiler.planning.plan_request import Request
from splitc.compiler.planning.resources import Resources
from splitc.compiler.planning.stage_search import Assignment


@dataclass(frozen=True)
class Way:
    """One way to use devices: so many of them, in so many stages."""

    devices: int
    stages: int = 1


@dataclass(frozen=True)
class Mode:
    """What a mode offers.

    stages: into how many stages it divides a model, on so many devices.
    ways: which ways to use up to so many devices are worth a try, of these numbers of devices.
    plan: decides. Raises CannotSplitError where the mode can't split the model, MisuseError for a request that it can't
    meet, DoesNotFitError when the devices can't hold it.
    replan: the plan of a file, with the assignments of its blocks. Raises as `plan` does.
    """

    stages: Callable[[Request, int], int]
    ways: Callable[[int, Sequence[int]], Sequence[Way]]
    plan: Callable[[Analysis, Resources, Request], Plan]
    replan: Callable[[Analysis, Resources, Request, PlanFile, Sequence[Assignment]], Plan]
