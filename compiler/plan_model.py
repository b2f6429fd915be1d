"""From a model and devices to a plan, in the mode that is asked for."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from splitc.compiler.analysis import Analysis, analyze, check_divisible
from splitc.compiler.budgets import check_shares, find_budgets
from splitc.compiler.plan import Plan, Request
from splitc.compiler.plan_layer import plan_layers
from splitc.compiler.plan_tensor import plan_tensors
from splitc.compiler.planner import OBJECTIVES
from splitc.runtime.devices import Device, parse_devices
from splitc.runtime.engines.kinds import choose_engine
from splitc.runtime.errors import MisuseError

MODES = {"layer": plan_layers, "tensor": plan_tensors}


def plan_model(model: str | Path, devices: Sequence[Device] | Sequence[str], request: Request = Request()) -> Plan:
    """Decide what of the model each device holds. `devices` may be names, as in `["cpu0", "cpu1"]`.

    Raises MisuseError for a request that contradicts itself or the model, ModelError for a model that can't be used
    or split, DoesNotFitError when the devices can't hold it.
    """
    devices = parse_devices([str(device) for device in devices])
    if request.split_mode not in MODES:
        raise MisuseError(f"unknown split mode '{request.split_mode}': there are {', '.join(MODES)}")
    if request.objective not in OBJECTIVES:
        raise MisuseError(f"unknown objective '{request.objective}': there are {', '.join(OBJECTIVES)}")
    if request.pipeline_stages != 1 and request.split_mode != "tensor":
        raise MisuseError("--pipeline-stages is for --split-mode tensor; layer mode makes a stage for each device")
    choose_engine(request.engine, devices)  # what is wrong with it is said before the model is read
    check_shares(request.tensor_split, len(devices))
    budgets = find_budgets(devices, request.memory, request.headroom)
    analysis = _analyze(Path(model), devices, request)
    return MODES[request.split_mode](analysis, devices, budgets, request)


def _analyze(model: Path, devices: Sequence[Device], request: Request) -> Analysis:
    stages = len(devices) if request.split_mode == "layer" else request.pipeline_stages
    analysis = analyze(model, request.asked_shapes, stages)
    if stages > 1:
        check_divisible(analysis)
    return analysis
