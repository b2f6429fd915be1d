"""The compiler's Python interface, which `splitc plan` and `splitc compile` call."""

from __future__ import annotations

from collections.abc import Sequence

from splitc.compiler.modes.choosing import make_plan
from splitc.compiler.packaging.profiling import measure_blocks
from splitc.compiler.planning.plan import Plan
from splitc.compiler.reading.in_memory import Given, model_file
from splitc.compiler.request.request import Request
from splitc.runtime.errors import MisuseError
from splitc.runtime.hardware.devices import Device
from splitc.runtime.threads.garbage import rare_garbage
from splitc.runtime.units import shortened


@rare_garbage()
def plan_model(model: Given, devices: str | Sequence[str | Device] = (), request: Request = Request()) -> Plan:
    """Decide which part of the model each device holds.

        plan = plan_model("model.onnx", "2xcpu", Request(split_mode="tensor", shapes={"input_ids": (1, 64)}))
        print(plan)  # the ranks, with their memory
        compile_model(plan, "package")

    `devices` may be names: `["cpu0", "cpu1"]`, `"2xcpu"`. Without any, all GPUs of this machine are used.

    `model` is a path, or a model in memory: an onnx.ModelProto, an onnx_ir.Model, or what torch.onnx.export returns. A
    model in memory is written to a temporary folder, which is deleted together with the plan.

    Raises MisuseError for a request that contradicts itself or the model, ModelError for a model that can't be used,
    CannotSplitError for a model that the mode can't split, DoesNotFitError if the devices can't hold the model. With
    `fallback`, the result is a plan in that mode and a warning, not a CannotSplitError.
    """
    if not isinstance(request, Request):
        raise MisuseError(f"a request is a Request, as in Request(split_mode='tensor'), not {shortened(repr(request))}")
    with model_file(model) as (path, keep):
        plan = make_plan(path, devices, request, measure_blocks if request.profile else None)
        keep(plan.analysis)
    return plan
