"""Auto mode: plan in every way that the devices allow, predict what each takes, and choose."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from splitc.compiler.analysis.facts import Analysis, analyze, check_divisible
from splitc.compiler.model_errors import ModelError
from splitc.compiler.modes.layer import plan_layers
from splitc.compiler.modes.row import plan_rows
from splitc.compiler.modes.tensor import plan_tensors
from splitc.compiler.planning.budgets import Budget, block_seconds
from splitc.compiler.planning.plan import Candidate, Plan, Request
from splitc.compiler.planning.prediction import Prediction, predict, rank_speed
from splitc.runtime.devices import Device, threads_for
from splitc.runtime.errors import DoesNotFitError, MisuseError
from splitc.runtime.machine import Machine, known_machine
from splitc.runtime.units import format_seconds

Planner = Callable[[Analysis, Sequence[Device], Sequence[Budget], Request], Plan]
# What plans in each mode that can be asked for.
PLANNERS: dict[str, Planner] = {"layer": plan_layers, "row": plan_rows, "tensor": plan_tensors}

# Candidates whose times differ by less than this share are as good. A stream hides what a device loses here and there,
# and times are no better known than that, measured or estimated; a single request hides nothing.
SLACK = {("throughput", False): 0.1, ("throughput", True): 0.05, ("latency", False): 0.02, ("latency", True): 0.02}
# Shares of what the fullest device holds that are not worth another device.
ROOM = 0.02
# Up to so many devices every number of them is tried; above, 1, 2, 4, ... and all.
FEW = 4


@dataclass(frozen=True)
class _Option:
    """One way to use the devices: a mode, on so many of them, in so many stages."""

    mode: str
    devices: int
    stages: int = 1

    @property
    def name(self) -> str:
        if self.devices == 1:
            return "one device"
        stages = f" in {self.stages} stages" if self.stages > 1 else ""
        return f"{self.mode} on {self.devices}{stages}"


def plan_auto(model: Path, devices: Sequence[Device], budgets: Sequence[Budget], request: Request) -> Plan:
    """The best plan for the request's objective among those that fit, in any mode on any number of the devices.

    Among plans about as fast, that which leaves most room on its fullest device. Raises DoesNotFitError when none fits,
    with what each mode lacks, ModelError for a model that can't be used.
    """
    tried = plan_candidates(model, devices, budgets, request)
    plans = {candidate.name: plan for candidate, plan in tried if plan is not None}
    candidates = [candidate for candidate, _ in tried]
    if not plans:
        raise DoesNotFitError(_explain_misfit(candidates))
    chosen = choose(candidates, request.objective, request.profile)
    plan = plans[chosen.name]
    return replace(plan, candidates=tuple(candidates), choice=_reason(chosen, candidates, request))


def choose(candidates: Sequence[Candidate], objective: str, profiled: bool) -> Candidate:
    """Of the candidates that are about as fast as the fastest that of which the fullest device has most room.

    A device more must be worth it: what differs by less than ROOM in what its fullest device holds is as good.
    """
    good = _about_as_fast(candidates, objective, profiled)
    least = min(each.fullest for each in good)
    roomy = [each for each in good if each.fullest <= least * (1 + ROOM)]
    return min(roomy, key=lambda each: (each.devices, _time(each, objective)))


def _about_as_fast(candidates: Sequence[Candidate], objective: str, profiled: bool) -> list[Candidate]:
    possible = [each for each in candidates if each.refused is None]
    best = min(_time(each, objective) for each in possible)
    return [each for each in possible if _time(each, objective) <= best * (1 + SLACK[objective, profiled])]


def plan_candidates(
    model: Path, devices: Sequence[Device], budgets: Sequence[Budget], request: Request
) -> list[tuple[Candidate, Plan | None]]:
    """All that is worth a try, each with its plan where there is one."""
    machine = known_machine()
    analyses = _Analyses(model, request)
    return [_try(option, analyses, devices, budgets, request, machine) for option in _options(devices, request)]


class _Analyses:
    """The model's analysis, anew where it must be cut more finely."""

    def __init__(self, model: Path, request: Request) -> None:
        self._model = model
        self._request = request
        self._known = {1: analyze(model, request.asked_shapes, 1, request.settings)}

    def get(self, stages: int) -> Analysis:
        first = self._known[1]
        if stages > len(first.partition.blocks) and stages not in self._known:
            self._known[stages] = analyze(self._model, self._request.asked_shapes, stages, self._request.settings)
        found = self._known.get(stages, first)
        if stages > 1:
            check_divisible(found)
        return found


def _options(devices: Sequence[Device], request: Request) -> Iterator[_Option]:
    """All that is worth a try. Shares are for all devices, and so is what is asked to be spread."""
    count = len(devices)
    numbers = [n for n in range(1, count + 1) if n <= FEW or n == count or n & (n - 1) == 0]
    if request.tensor_split is not None or request.spread:
        numbers = [count]
    for number in numbers:
        yield _Option("layer", number)
    for number in (number for number in numbers if number > 1):
        yield _Option("tensor", number)
        yield _Option("row", number)
    for stages in range(2, count // 2 + 1):
        if count % stages == 0:
            yield _Option("tensor", count, stages)


def _try(
    option: _Option,
    analyses: _Analyses,
    devices: Sequence[Device],
    budgets: Sequence[Budget],
    request: Request,
    machine: Machine,
) -> tuple[Candidate, Plan | None]:
    """Plan in one way. Of more devices than it needs it takes those with the largest budgets."""
    ranked = sorted(range(len(devices)), key=lambda number: -(budgets[number] or 0))
    places = sorted(ranked[: option.devices])
    on, within = [devices[place] for place in places], [budgets[place] for place in places]
    wanted = replace(request, split_mode=option.mode, spread=True, pipeline_stages=option.stages)
    try:
        stages = option.devices if option.mode == "layer" else option.stages
        plan = PLANNERS[option.mode](analyses.get(stages), on, within, wanted)
    except (ModelError, DoesNotFitError, MisuseError) as error:
        return Candidate(option.name, option.mode, option.devices, refused=_in_short(error)), None
    found = predict(plan, machine, request.threads, _measured(plan.analysis, on, request))
    return _describe(option, plan, found), plan


def _in_short(error: Exception) -> str:
    """The first clause of what a planner says."""
    return re.split(r"[:;]", str(error), maxsplit=1)[0]


def _measured(analysis: Analysis, devices: Sequence[Device], request: Request) -> float:
    """What the blocks were measured to take over what is estimated for them; 1 where nothing is measured."""
    if not request.profile:
        return 1.0
    speed = rank_speed(devices[0], threads_for(devices, request.threads), 1)
    nodes = [node for block in analysis.partition.blocks for node in block.nodes]
    estimated = sum(analysis.costs.seconds(node, speed) for node in nodes)
    return sum(block_seconds(analysis, devices, request)) / max(estimated, 1e-9)


def _describe(option: _Option, plan: Plan, found: Prediction) -> Candidate:
    peaks = [rank.memory.total for rank in plan.ranks]
    # Where a budget is not known, what counts is how much a device holds.
    known = all(rank.budget is not None for rank in plan.ranks)
    fullest = max(peak / max(1, rank.budget or 1) if known else peak for rank, peak in zip(plan.ranks, peaks))
    return Candidate(option.name, option.mode, option.devices, found.latency, found.interval, fullest, peaks)


def _time(candidate: Candidate, objective: str) -> float:
    return candidate.latency if objective == "latency" else candidate.interval


def _reason(chosen: Candidate, candidates: Sequence[Candidate], request: Request) -> str:
    good = _about_as_fast(candidates, request.objective, request.profile)
    what = "a request" if request.objective == "latency" else "between requests that stream"
    time = format_seconds(_time(chosen, request.objective))
    if len(good) == 1:
        return f"{chosen.name}: predicted to be the fastest, {time} {what}"
    best = format_seconds(min(_time(each, request.objective) for each in good))
    return (
        f"{chosen.name}: {time} {what}, of {len(good)} about as fast (the fastest {best}) the one whose fullest device "
        "has most room, with as few devices as give that"
    )


def _explain_misfit(candidates: Sequence[Candidate]) -> str:
    """What each mode lacks, on the number of devices with which it lacks least: the largest."""
    last = {candidate.mode: candidate for candidate in candidates}
    lines = [f"  {candidate.name}: {candidate.refused}" for candidate in last.values()]
    return (
        "the model does not fit these devices in any mode, or can't be split:\n"
        + "\n".join(lines)
        + "\nGive the devices more memory (--memory, --headroom), add one (-d), or plan for smaller inputs (--shapes)."
    )
