"""Batch mode: each device has the whole model, and computes its rows of a request (data parallel)."""

from __future__ import annotations

from collections.abc import Sequence

from splitc.compiler.modes.layer import plan_layers, replan_layers
from splitc.compiler.modes.mode import Mode, Way


def _ways(hosts: Sequence[int], numbers: Sequence[int]) -> list[Way]:
    """A group of each device, for these numbers of devices."""
    return [Way(number, groups=number) for number in numbers if number > 1]


MODE = Mode(
    stages=lambda request, devices: 1,
    ways=_ways,
    plan=plan_layers,
    replan=replan_layers,
    groups=lambda request, devices: devices,
)
