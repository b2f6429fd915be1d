"""Makes a plan for a model and devices, in the mode of the request."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import msgspec

from splitc.compiler.errors import CannotSplitError
from splitc.compiler.modes.asked import analyze_for, check_divisible
from splitc.compiler.modes.auto import plan_auto, predict_asked
from splitc.compiler.modes.replicas import check_groups, plan_in_groups
from splitc.compiler.modes.rows import NoRowsError
from splitc.compiler.modes.table import AUTO, FALLBACKS, MODES, find_mode
from splitc.compiler.planning.assembly import DOES_NOT_RUN, why_not_run
from splitc.compiler.planning.plan import Plan
from splitc.compiler.planning.resources import BlockTimer, Resources, check_shares, find_budgets
from splitc.compiler.request.request import DISK, HOST, OBJECTIVES, Request
from splitc.runtime.engines.kinds import choose_engine
from splitc.runtime.errors import MisuseError
from splitc.runtime.hardware.devices import Device, host_numbers, parse_devices
from splitc.runtime.hardware.machine import known_machine
from splitc.runtime.hardware.profiles import INTERCONNECT, parse_link


def make_plan(
    model: Path, devices: str | Sequence[str | Device], request: Request, timer: BlockTimer | None = None
) -> Plan:
    """Plan what each device holds of the model. `timer` measures the blocks; without one, times are estimated.

    Raises as `plan_model`.
    """
    devices = parse_devices(devices if isinstance(devices, str) else [str(device) for device in devices])
    if request.split_mode == AUTO and request.places_weights:
        request = replace(request, split_mode="layer")  # the mode that can place weights
    _check_request(request, devices)
    request.check_engine(choose_engine(request.engine, devices))  # before the model is read
    check_shares(request.tensor_split, len(devices))
    budgets = find_budgets(devices, request.memory, request.headroom)
    machine = known_machine()
    if request.interconnect is not None:
        machine = msgspec.structs.replace(machine, interconnect=parse_link(request.interconnect))
    resources = Resources(tuple(devices), tuple(budgets), request.threads, timer, machine)
    plan = _plan_or_fall_back(model, resources, request)
    return replace(plan, warnings=(*plan.warnings, *_host_warnings(resources, request)))


def _plan_or_fall_back(model: Path, resources: Resources, request: Request) -> Plan:
    if request.split_mode == AUTO:
        return plan_auto(model, resources, request)
    try:
        return _plan_in_mode(model, resources, request)
    except CannotSplitError as error:
        if request.fallback is None:
            raise
        reason = str(error)
        groups = 1 if isinstance(error, NoRowsError) else request.batch_groups
    other = replace(request, split_mode=request.fallback, batch_groups=groups)
    plan = _plan_in_mode(model, resources, other)
    return replace(plan, warnings=(f"split by {request.fallback} instead: {reason}", *plan.warnings))


def _host_warnings(resources: Resources, request: Request) -> list[str]:
    """Warnings that budgets of other hosts, or links between hosts, are assumptions."""
    warnings = []
    named = {text.rpartition("=")[0] for text in request.memory}
    budgets = zip(resources.devices, resources.budgets, strict=True)
    if any(
        device.host is not None and budget is not None and not {"", str(device)} & named for device, budget in budgets
    ):
        warnings.append(
            "the budgets are this machine's free memory, as if every host were like it: give --memory if they are not, "
            "as in --memory 80GB for each device"
        )
    if resources.machine.interconnect is None and len(host_numbers(resources.devices)) > 1:
        warnings.append(
            f"the links between hosts were not measured: a typical one ({INTERCONNECT}) is used. Measure one there "
            "(mpirun ... splitc devices --measure), or give it, as in --interconnect 25GB/s,5us"
        )
    return warnings


def _plan_in_mode(model: Path, resources: Resources, request: Request) -> Plan:
    mode = find_mode(request.split_mode)
    count = len(resources.devices)
    groups = mode.groups(request, resources.devices)
    check_groups(request, count, groups)
    wanted = mode.stages(request, count // groups)
    analysis = analyze_for(model, resources.devices, request, wanted, request.asked_states)
    if count > groups:
        check_divisible(analysis)
    try:
        plan = plan_in_groups(mode, analysis, resources, request)
    except CannotSplitError as error:
        if (why := why_not_run(analysis)) is None:
            raise
        raise type(error)(f"{error}\nBesides, {DOES_NOT_RUN}: give those that it takes (--shapes). {why}") from error
    return replace(plan, prediction=predict_asked(plan, resources, request))


def _check_request(request: Request, devices: Sequence[Device]) -> None:
    """Raise MisuseError for an unknown mode, objective or fallback, and for an option without effect."""
    modes = (AUTO, *MODES)
    if request.split_mode not in modes:
        of_several = "; a mode with a name is for a model of a folder, and this is one model"
        raise MisuseError(
            f"unknown split mode '{request.split_mode}': there are {', '.join(modes)}"
            + of_several * ("=" in request.split_mode)
        )
    if request.objective not in OBJECTIVES:
        raise MisuseError(f"unknown objective '{request.objective}': there are {', '.join(OBJECTIVES)}")
    if request.weights_at not in (HOST, DISK):
        raise MisuseError(f"unknown --weights-at '{request.weights_at}': there are {HOST}, {DISK}")
    if request.weights_at == DISK and not any(device.kind == "cpu" for device in devices):
        raise MisuseError("--weights-at disk is for CPU devices, and there are none among the plan's")
    if request.fallback is not None and request.fallback not in FALLBACKS:
        raise MisuseError(f"unknown fallback '{request.fallback}': there is {', '.join(FALLBACKS)}")
    request.check_modes()
    if request.interconnect is not None and len(host_numbers(devices)) < 2:
        raise MisuseError("--interconnect is a link between hosts, and the devices are not of several: see --hosts")
