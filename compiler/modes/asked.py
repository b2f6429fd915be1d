"""Analyzes a model as a request asks for."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from splitc.compiler.analysis.facts import Analysis, analyze
from splitc.compiler.fusion.kernels import gains_of
from splitc.compiler.request.request import Request
from splitc.compiler.request.shapes import AskedStates
from splitc.runtime.adapters.asked import open_adapter
from splitc.runtime.engines.kinds import choose_engine, maps_weights
from splitc.runtime.hardware.devices import Device


def analyze_for(
    model: Path, devices: Sequence[Device], request: Request, wanted_blocks: int, states: AskedStates
) -> Analysis:
    """Analyze a model for a request, on these devices. Raises as `analyze`."""
    adapters = [(open_adapter(path), strength) for path, strength in request.lora]
    engine = choose_engine(request.engine, devices)
    gains = None if request.no_fuse else gains_of(engine, devices)
    return analyze(
        model,
        request.asked_shapes,
        wanted_blocks,
        request.settings,
        request.trust_external_data,
        states,
        gains,
        adapters,
        request.lora_slots,
        maps_weights(engine, devices),
    )
