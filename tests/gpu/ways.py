"""How a script's package uses its devices: a mode, or groups with a mode inside, such as `2xtensor`."""

from __future__ import annotations

from typing import Any

from splitc.compiler import Plan, Request
from splitc.compiler.modes.auto import predict
from splitc.compiler.planning.clock import Prediction
from splitc.runtime.hardware.machine import known_machine


def way_request(way: str, **options: Any) -> Request:
    """The request for a way. Raises ValueError if the number of groups is not a number."""
    groups, _, mode = way.rpartition("x")
    return Request(split_mode=mode, batch_groups=int(groups or 1), spread=True, **options)


def predicted(plan: Plan) -> Prediction:
    """The times that plans predict on this machine, from what `splitc devices --measure` measured."""
    return predict(plan, known_machine(), None)
