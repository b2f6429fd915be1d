"""The compiler from Python: what `splitc plan` and `splitc compile` call. Here the rooms are put together."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from splitc.compiler.modes.choosing import make_plan
from splitc.compiler.packaging.profiling import measure_blocks
from splitc.compiler.planning.plan import Plan
from splitc.compiler.planning.plan_request import Request
from splitc.runtime.devices import Device


def plan_model(model: str | Path, devices: Sequence[Device] | Sequence[str], request: Request = Request()) -> Plan:
    """Decide what of the model each device holds. `devices` may be names, as in `["cpu0", "cpu1"]`.

    Raises MisuseError for a request that contradicts itself or the model, ModelError for a model that can't be used,
    CannotSplitError for one that this mode can't split (with `fallback`, the plan is in that mode then, and says so),
    DoesNotFitError when the devices can't hold it.
    """
    return make_plan(Path(model), devices, request, measure_blocks if request.profile else None)
