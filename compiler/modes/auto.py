"""Auto mode: makes a plan for each mode and way to use the devices, predicts their times, and chooses one."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import onnx_ir as ir

from splitc.compiler.analysis.facts import Analysis, with_blocks
from splitc.compiler.engine_graphs.gpu_fusions import fused_away
from splitc.compiler.errors import ModelError
from splitc.compiler.lowering.segments import has_operators
from splitc.compiler.modes.asked import analyze_for, check_divisible
from splitc.compiler.modes.mode import Mode, Way
from splitc.compiler.modes.replicas import plan_in_groups, predict_in_groups
from splitc.compiler.modes.table import BATCH, MODES, find_mode
from splitc.compiler.planning.clock import Clock, Prediction, block_seconds, estimate_blocks
from splitc.compiler.planning.host_groups import count_hosts, describe_hosts, group_devices, host_sizes, numbers_to_try
from splitc.compiler.planning.plan import Alternative, Plan
from splitc.compiler.planning.resources import Resources
from splitc.compiler.remembered import remembered
from splitc.compiler.request.request import Request
from splitc.runtime.engines.kinds import ONNXRUNTIME
from splitc.runtime.errors import DoesNotFitError, MisuseError, SplitcError
from splitc.runtime.hardware.devices import threads_for
from splitc.runtime.hardware.machine import Machine
from splitc.runtime.threads.progress import counted
from splitc.runtime.units import format_seconds

# By objective: alternatives whose times differ by less than this share are equally fast. Predictions of throughput are
# less exact, since a stream of requests hides delays of single devices.
SLACK = {"throughput": 0.05, "latency": 0.02}
# Minimum share of the fullest device's memory that using another device must free. A choice: without a minimum, auto
# mode would use another device for a few bytes. With 0 the plans of 11 models are the same; with 0.1 all but one.
LEAST_MEMORY_GAIN = 0.02


@dataclass(frozen=True)
class _Option:
    """A mode, and a way to use devices in it."""

    mode: str
    way: Way

    @property
    def name(self) -> str:
        if self.way.devices == 1:
            return "one device"
        way = self.way
        inside = way.devices // way.groups
        groups = f"{way.groups} groups of " if 1 < way.groups < way.devices else ""
        stages = f" in {way.stages} stages" if 1 < way.stages < inside else ""
        return f"{self.mode} on {groups}{inside if groups else way.devices}{stages}"


def plan_auto(model: Path, resources: Resources, request: Request) -> Plan:
    """The best plan for the request's objective among those that fit, in any mode on any number of the devices.

    Among plans of about equal time, it is the one that leaves the most free memory on its fullest device. Raises
    DoesNotFitError if none fits, with the reason in each mode; ModelError for a model that can't be used; MisuseError
    for a request that no mode can have.
    """
    tried = plan_alternatives(model, resources, request)
    plans = {alternative.name: plan for alternative, plan in tried if isinstance(plan, Plan)}
    alternatives = [alternative for alternative, _ in tried]
    if not plans:
        misused = next((error for _, error in tried if isinstance(error, MisuseError)), None)
        if misused is not None and not any(isinstance(error, DoesNotFitError) for _, error in tried):
            raise misused
        raise DoesNotFitError(_explain_misfit(alternatives))
    chosen = choose(alternatives, request.objective)
    reason = _reason(chosen, alternatives, request)
    return replace(plans[chosen.name], alternatives=tuple(alternatives), choice=reason)


def choose(alternatives: Sequence[Alternative], objective: str) -> Alternative:
    """The alternative with the most free memory on its fullest device, among those within SLACK of the fastest.

    It uses no more hosts than this speed needs, and no more devices than needed: another one must relieve the fullest
    device by LEAST_MEMORY_GAIN.
    """
    good = _on_fewest_hosts(_about_as_fast(alternatives, objective))
    least = min(candidate.fullest for candidate in good)
    free = [candidate for candidate in good if candidate.fullest <= least * (1 + LEAST_MEMORY_GAIN)]
    return min(free, key=lambda candidate: (candidate.devices, _time(candidate, objective)))


def _about_as_fast(alternatives: Sequence[Alternative], objective: str) -> list[Alternative]:
    possible = [candidate for candidate in alternatives if candidate.refused is None]
    best = min(_time(candidate, objective) for candidate in possible)
    return [candidate for candidate in possible if _time(candidate, objective) <= best * (1 + SLACK[objective])]


def _on_fewest_hosts(alternatives: Sequence[Alternative]) -> list[Alternative]:
    fewest = min(candidate.hosts for candidate in alternatives)
    return [candidate for candidate in alternatives if candidate.hosts == fewest]


Tried = tuple[Alternative, Plan | SplitcError]


def plan_alternatives(model: Path, resources: Resources, request: Request) -> list[Tried]:
    """All alternatives that are tried, each with its plan, or with the error that refuses it."""
    options = _options(resources, request)
    if not options:
        raise MisuseError(
            f"--batch-groups is {request.batch_groups}, and auto mode makes no {request.batch_groups} equal groups of "
            f"{len(resources.devices)} devices for this model: give another number, or choose the mode (--split-mode)"
        )
    analysis = analyze_for(model, resources.devices, request, 1, request.asked_states)
    return [_try(option, analysis, resources, request) for option in counted("planning candidates", options)]


def _options(resources: Resources, request: Request) -> list[_Option]:
    """The alternatives to try: first those that keep the model's computation, then by number of devices.

    If the request gives shares or asks for `spread`, only those with all devices. If it asks for a number of replicas,
    only those with that number of groups.
    """
    count, hosts = len(resources.devices), host_sizes(resources.devices)
    numbers = sorted({*numbers_to_try(count), *(sum(hosts[:few]) for few in numbers_to_try(len(hosts)))})
    options = [_Option(mode, way) for mode in MODES for way in find_mode(mode).ways(hosts, numbers)]
    options += [_Option(mode, way) for mode in MODES for way in _in_groups(find_mode(mode), hosts)]
    if not request.may_copy:
        options = [option for option in options if option.way.groups == 1]
    if request.batch_groups > 1:
        options = [option for option in options if option.way.groups == request.batch_groups]
    if request.tensor_split is not None or request.spread:
        options = [option for option in options if option.way.devices == count]
    return sorted(options, key=lambda option: _order(option.way))


def _in_groups(mode: Mode, hosts: Sequence[int]) -> list[Way]:
    """The ways to use all devices in several groups, each with the whole model, split in this mode.

    Each group is inside a host, if hosts have enough devices.
    """
    count = sum(hosts)
    ways = []
    for groups in (number for number in range(2, count // 2 + 1) if count % number == 0):
        size = count // groups
        inside = mode.ways([size], [size])
        ways += [replace(way, devices=count, groups=groups) for way in inside if way.groups == 1 < way.devices == size]
    return ways


def _order(way: Way) -> tuple[bool, int, int, int]:
    """A sort key: ways that keep the model's computation come first, then those with fewer devices."""
    size = way.devices // way.groups
    return way.stages < size, way.stages if way.stages < size else 0, way.groups, way.devices


def _try(option: _Option, analysis: Analysis, resources: Resources, request: Request) -> Tried:
    """Plan one option, on the devices with the largest budgets, each group inside a host if possible."""
    way, mode = option.way, find_mode(option.mode)
    groups = way.groups * way.stages
    taken = resources.take(sorted(group_devices(resources.devices, resources.budgets, groups, way.size)))
    # With a fallback, a mode refuses a model that it could split only with a loss of time: other modes are tried too.
    wanted = replace(
        request,
        split_mode=option.mode,
        spread=True,
        pipeline_stages=way.stages,
        batch_groups=1 if option.mode == BATCH else way.groups,
        fallback="layer",
    )
    inside = way.devices // way.groups
    try:
        analysis = with_blocks(analysis, mode.stages(wanted, inside))
        if inside > 1:
            check_divisible(analysis)
        plan = plan_in_groups(mode, analysis, taken, wanted)
    except (ModelError, DoesNotFitError, MisuseError) as error:
        why = re.split(r"[:;]\s", str(error), maxsplit=1)[0]  # names may have colons
        return Alternative(option.name, option.mode, way.devices, refused=why), error
    prediction = predict_asked(plan, taken, request)
    return _describe(option, plan, prediction), replace(plan, prediction=prediction)


def predict_asked(plan: Plan, resources: Resources, request: Request) -> Prediction:
    """Predict a plan's times with the resources that it was made for."""
    return predict(plan, resources.machine, request.threads, _measured(plan.analysis, resources, request))


def predict(plan: Plan, machine: Machine, threads: int | None, measured: float = 1.0) -> Prediction:
    """Predict a plan's times on a machine. `threads` are those of each CPU device; None divides the cores.

    `measured` is the ratio of the blocks' measured to their estimated time.
    """
    devices = [rank.device for rank in plan.ranks]
    operators = has_operators(plan.engine, devices)
    threads_each = threads_for(devices, threads)
    clock = Clock(plan.analysis, plan.ranks, machine, threads_each, measured, plan.profiled, operators)
    if plan.engine == ONNXRUNTIME and any(device.kind == "cuda" for device in devices):
        clock = replace(clock, fused=_fused_on_gpus(plan.analysis))
    prediction = (
        plan.split.predict(plan.ranks, plan.cuts, clock)
        if plan.replicas is None
        else predict_in_groups(plan, plan.replicas, clock)
    )
    return replace(prediction, interval=prediction.interval * (1 + clock.held_up))


@remembered
def _fused_on_gpus(analysis: Analysis) -> frozenset[ir.Node]:
    """The nodes that ONNX Runtime's engines for GPUs fuse into others, so that they take no time of their own."""
    return fused_away(analysis.graph, analysis.costs.bound.shapes) if analysis.fuses else frozenset()


def _measured(analysis: Analysis, resources: Resources, request: Request) -> float:
    """The ratio of the blocks' measured to their estimated time on the first device; 1 without a profile."""
    if not request.profile:
        return 1.0
    estimated = sum(estimate_blocks(analysis, resources, 0, 1))
    return sum(block_seconds(analysis, resources, [0])[0]) / max(estimated, 1e-9)


def _describe(option: _Option, plan: Plan, prediction: Prediction) -> Alternative:
    peaks = [rank.memory.total for rank in plan.ranks]
    # Without all budgets, devices are compared by the bytes that they hold.
    all_known = all(rank.budget is not None for rank in plan.ranks)
    fullest = max(
        peak / max(1, rank.budget or 1) if all_known else peak for rank, peak in zip(plan.ranks, peaks, strict=True)
    )
    return Alternative(
        option.name,
        option.mode,
        option.way.devices,
        prediction.latency,
        prediction.interval,
        fullest,
        peaks,
        count_hosts(plan.ranks),
        describe_hosts(plan.ranks),
    )


def _time(alternative: Alternative, objective: str) -> float:
    return alternative.latency if objective == "latency" else alternative.interval


def _reason(chosen: Alternative, alternatives: Sequence[Alternative], request: Request) -> str:
    good = _about_as_fast(alternatives, request.objective)
    what = "a request" if request.objective == "latency" else "between requests that stream"
    time = format_seconds(_time(chosen, request.objective))
    if len(good) == 1:
        return f"{chosen.name}: predicted to be the fastest, {time} {what}"
    best = format_seconds(min(_time(candidate, request.objective) for candidate in good))
    beyond = len(good) - len(_on_fewest_hosts(good))
    hosts = f"; {beyond} of them need more hosts" if beyond else ""
    slack = SLACK[request.objective]
    return (
        f"{chosen.name}: {time} {what}; of {len(good)} candidates within {slack:.0%} (fastest: {best}{hosts}), "
        "the one that leaves the most free memory, on the fewest devices"
    )


def _explain_misfit(alternatives: Sequence[Alternative]) -> str:
    """The message that no mode fits, with each mode's reason on its largest number of devices."""
    last = {candidate.mode: candidate for candidate in alternatives}
    lines = [f"  {candidate.name}: {candidate.refused}" for candidate in last.values()]
    return (
        "the model does not fit these devices in any mode, or can't be split:\n"
        + "\n".join(lines)
        + "\nGive the devices more memory (--memory, --headroom), add one (-d), or plan for smaller inputs (--shapes)."
    )
