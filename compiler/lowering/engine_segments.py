"""One engine for a rank's graph if it can have the collectives inside; else one for each segment between them."""

from __future__ import annotations

from collections.abc import Collection, Sequence

import onnx_ir as ir

from splitc.compiler.lowering.collective_operators import use_operators
from splitc.compiler.lowering.rank_forms import COLLECTIVE
from splitc.compiler.lowering.segments import Segment, cut_segments
from splitc.runtime.devices import Device
from splitc.runtime.engines.kinds import find_kind, has_collectives


def engine_segments(graph: ir.Graph, outputs: Collection[str], engine: str, devices: Sequence[Device]) -> list[Segment]:
    """What a rank's engines run of its graph. `devices` are those of all ranks, `outputs` the names that it gives."""
    if not has_collectives(engine, devices):
        return cut_segments(graph, outputs, COLLECTIVE)
    if has_operators(engine, devices):
        return [Segment(use_operators(graph, outputs), ())]
    return [Segment(graph, ())]


def has_operators(engine: str, devices: Sequence[Device]) -> bool:
    """Whether engines have collectives inside as operators of splitc's library."""
    return has_collectives(engine, devices) and find_kind(engine).uses_operators
