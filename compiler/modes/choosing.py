"""From a model and devices to a plan, in the mode that is asked for."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from splitc.compiler.analysis.facts import Analysis, analyze, check_divisible
from splitc.compiler.model_errors import CannotSplitError
from splitc.compiler.modes.auto import PLANNERS, plan_auto
from splitc.compiler.planning.budgets import check_shares, find_budgets
from splitc.compiler.planning.plan import Plan, Request
from splitc.compiler.planning.stage_search import OBJECTIVES
from splitc.compiler.sharding.row_split import LEAST_SIDE
from splitc.runtime.devices import Device, parse_devices
from splitc.runtime.engines.kinds import choose_engine
from splitc.runtime.errors import MisuseError

MODES = ("auto", *PLANNERS)
# The modes that any model can be split in.
FALLBACKS = ("layer",)


def plan_model(model: str | Path, devices: Sequence[Device] | Sequence[str], request: Request = Request()) -> Plan:
    """Decide what of the model each device holds. `devices` may be names, as in `["cpu0", "cpu1"]`.

    Raises MisuseError for a request that contradicts itself or the model, ModelError for a model that can't be used,
    CannotSplitError for one that this mode can't split (with `fallback`, the plan is in that mode then, and says so),
    DoesNotFitError when the devices can't hold it.
    """
    devices = parse_devices([str(device) for device in devices])
    _check_request(request)
    choose_engine(request.engine, devices)  # what is wrong with it is said before the model is read
    check_shares(request.tensor_split, len(devices))
    budgets = find_budgets(devices, request.memory, request.headroom)
    if request.split_mode == "auto":
        return plan_auto(Path(model), devices, budgets, request)
    try:
        return PLANNERS[request.split_mode](_analyze(Path(model), devices, request), devices, budgets, request)
    except CannotSplitError as error:
        if request.fallback is None:
            raise
        reason = str(error)
    request = replace(request, split_mode=request.fallback)
    plan = PLANNERS[request.split_mode](_analyze(Path(model), devices, request), devices, budgets, request)
    return replace(plan, warnings=(f"split by {request.split_mode} instead: {reason}", *plan.warnings))


def _check_request(request: Request) -> None:
    """Raise MisuseError for a word that is none, and for an option of another mode."""
    if request.split_mode not in MODES:
        raise MisuseError(f"unknown split mode '{request.split_mode}': there are {', '.join(MODES)}")
    if request.objective not in OBJECTIVES:
        raise MisuseError(f"unknown objective '{request.objective}': there are {', '.join(OBJECTIVES)}")
    if request.fallback is not None and request.fallback not in FALLBACKS:
        raise MisuseError(f"unknown fallback '{request.fallback}': there is {', '.join(FALLBACKS)}")
    if request.pipeline_stages != 1 and request.split_mode != "tensor":
        raise MisuseError("--pipeline-stages is for --split-mode tensor; layer mode makes a stage for each device")
    if request.main_device is not None and request.split_mode != "row":
        raise MisuseError("--main-device is for --split-mode row; in other modes no device is the main one")
    if request.row_min != LEAST_SIDE and request.split_mode != "row":
        raise MisuseError("--row-min is for --split-mode row")


def _analyze(model: Path, devices: Sequence[Device], request: Request) -> Analysis:
    stages = len(devices) if request.split_mode == "layer" else request.pipeline_stages
    analysis = analyze(model, request.asked_shapes, stages, request.settings)
    if stages > 1:
        check_divisible(analysis)
    return analysis
