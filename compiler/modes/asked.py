"""Analyzes a model as a request asks for, and checks whether it can be cut at all."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

import onnx_ir as ir

from splitc.compiler.analysis.facts import Analysis, analyze
from splitc.compiler.errors import ModelError
from splitc.compiler.graphs.reads import holds_graphs
from splitc.compiler.graphs.walks import ancestors, producers
from splitc.compiler.nodes import describe_node
from splitc.compiler.normal_form.graph import Graph
from splitc.compiler.patterns.kernels import gains_of
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


# If a control flow node holds more than this share of the weights, other ranks would hold next to nothing. A choice:
# it is meant for merged decoders, which have all weights in one If. With a lower share, models that can be split would
# be refused.
INDIVISIBLE = 0.9
# An input of at most this many elements can be bound on the command line: a switch or a setting, not data. A choice,
# for a message's advice alone.
FEW = 16


def check_divisible(analysis: Analysis) -> None:
    """Raise ModelError if most of the model is inside one If, Loop or Scan, which can't be cut (a merged decoder)."""
    costs, partition = analysis.costs, analysis.partition
    whole = costs.weight_bytes(analysis.graph.nodes)
    for node in (node for block in partition.blocks for node in block.nodes if holds_graphs(node)):
        inside = costs.weight_bytes([node, *partition.upstream[node]])
        if inside > INDIVISIBLE * whole:
            raise ModelError(
                f"{describe_node(node)} holds {inside / whole:.0%} of the model's weights, "
                f"and splitc does not cut inside control flow{_way_out(analysis.graph, node)}, or name one device"
            )


def _way_out(graph: Graph, node: ir.Node) -> str:
    """What users can do: bind the inputs that an If depends on, if these are small.

    Tables of modes show the text before the first colon.
    """
    deciding = _deciding_inputs(graph, node) if node.op_type == "If" else []
    if not deciding:
        return ": export the model without it"
    values = " and ".join(
        f"--set {value.name}={'true' if value.dtype == ir.DataType.BOOL else 'VALUE'}" for value in deciding
    )
    these, them = ("these inputs", "them") if len(deciding) > 1 else ("this input", "it")
    return f" without {values}: its condition depends on {these}. Bind {them} so"


def _deciding_inputs(graph: Graph, node: ir.Node) -> list[ir.Value]:
    """The model's inputs that an If's condition depends on; none if one of them has more than FEW elements."""
    condition = ancestors(producers(node.inputs), graph.reads.__getitem__)
    read = {*node.inputs, *(value for above in condition for value in graph.reads[above])}
    inputs = [value for value in graph.graph.inputs if value in read]
    sizes = (value.shape.numpy() if value.shape is not None and value.shape.is_static() else None for value in inputs)
    return inputs if all(shape is not None and math.prod(shape) <= FEW for shape in sizes) else []
