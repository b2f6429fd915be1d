"""Batch mode (data parallel): each device has the whole model, and computes some rows of each request."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from splitc.compiler.modes.layer import MODE as LAYER
from splitc.compiler.modes.mode import Way
from splitc.compiler.placement.asked import asked_devices
from splitc.compiler.request.request import Request
from splitc.runtime.hardware.devices import Device


def _ways(hosts: Sequence[int], numbers: Sequence[int]) -> list[Way]:
    """Each device is a group, for these numbers of devices."""
    return [Way(number, groups=number) for number in numbers if number > 1]


def _groups(request: Request, devices: Sequence[Device]) -> int:
    """The number of groups: one for each device, or with placed weights, the most whose first one has these devices."""
    least = max(asked_devices(devices, request), default=-1) + 1
    sizes = range(max(least, 2), len(devices)) if least else [1]
    return len(devices) // next((size for size in sizes if len(devices) % size == 0), len(devices))


MODE = replace(LAYER, ways=_ways, groups=_groups)
