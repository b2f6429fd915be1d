"""One engine for a rank's graph, if engines can communicate inside; else segments between communication nodes."""

from __future__ import annotations

from collections.abc import Collection, Sequence

import onnx_ir as ir

from splitc.compiler.lowering.communication import communicates, use_operators
from splitc.compiler.lowering.rank_forms import COLLECTIVE
from splitc.compiler.lowering.segments import Segment, cut_segments
from splitc.runtime.engines.kinds import find_kind, has_collectives
from splitc.runtime.hardware.devices import Device


def engine_segments(graph: ir.Graph, outputs: Collection[str], engine: str, devices: Sequence[Device]) -> list[Segment]:
    """The segments of a rank's graph, one for each engine; they compute the named `outputs`.

    `devices` are those of all ranks.
    """
    if has_operators(engine, devices):
        return [Segment(use_operators(graph, outputs), ())]
    inside = has_collectives(engine, devices)
    joints = [node for node in graph if communicates(node) and not (inside and node.op_type == COLLECTIVE)]
    return [Segment(graph, ())] if inside and not joints else cut_segments(graph, outputs, joints)


def has_operators(engine: str, devices: Sequence[Device]) -> bool:
    """Whether all communication runs inside the engines, as operators of splitc's library."""
    return has_collectives(engine, devices) and find_kind(engine).uses_operators
