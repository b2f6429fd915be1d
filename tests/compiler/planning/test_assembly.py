"""The engines' own memory."""

from __future__ import annotations

from pathlib import Path

import pytest

from splitc.compiler import Request, plan_model
from splitc.compiler.planning.assembly import CPU_ENGINE, engine_bytes
from splitc.runtime.engines.kinds import ONNXRUNTIME
from splitc.runtime.errors import DoesNotFitError
from splitc.runtime.hardware.devices import parse_devices


def test_ranks_share_as_much_memory_as_they_exchange() -> None:
    """Processes touch only the part of the shared memory for sums that they write, up to a limit."""
    devices = parse_devices(["3xcpu"])
    alone, small, large = (
        engine_bytes(devices[0], devices, ONNXRUNTIME, crossing=sums) for sums in ([], [1000, 24], [1 << 30])
    )
    assert small - alone == 2 * CPU_ENGINE.sum + 3 * 1024
    assert large - alone == CPU_ENGINE.sum + 3 * CPU_ENGINE.met


def test_plans_fit_even_where_predictions_are_off(decoder: Path) -> None:
    """A budget of exactly the memory of weights, values and engines is refused."""
    plan = plan_model(decoder, ["cpu0"], Request(memory=["1GiB"]))
    memory = plan.ranks[0].memory
    margin = int(memory.values * CPU_ENGINE.error)
    assert margin > 0
    plan_model(decoder, ["cpu0"], Request(memory=[str(memory.total)]))
    with pytest.raises(DoesNotFitError):
        plan_model(decoder, ["cpu0"], Request(memory=[str(memory.total - margin)]))
