"""Compares the bytes of a run's values, as the plan counts them, with ONNX Runtime's profile."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import onnx_ir as ir
from onnx_ir.passes.common import ShapeInferencePass

from models.writer import Writer, save
from splitc.compiler.execution.arena import FIRST_REGION
from splitc.compiler.execution.exchange import EngineGraph, NodeShapes
from splitc.compiler.execution.optimized import optimize
from splitc.compiler.execution.run import arena_bytes
from tests.helpers.graphs import read_graph
from tests.helpers.profiles import named, profile, reads

# Values of one and a half first regions: a region for one is twice the first, and has no memory for a second.
BYTES, CHUNK = 3 * FIRST_REGION // 2, 2 * FIRST_REGION


def assert_bytes_are_those_in_use(
    w: Writer,
    feeds: dict[str, Any],
    folder: Path,
    kernels: list[str] | None,
    shapes: NodeShapes | None = None,
    in_order: bool = False,
) -> None:
    """Run a model whose values have BYTES, or nearly none, and compare the plan's bytes with those in use.

    ONNX Runtime must run it in these `kernels`; None for the kernels of an operator's function. With `in_order`, the
    plan must have the same nodes in the same order.
    """
    save(ShapeInferencePass()(named(w.model())).model, folder / "model.onnx")
    events = profile(folder / "model.onnx", feeds, folder, optimized=True)
    assert kernels is None or [event["args"]["op_name"] for event in events] == kernels
    graph = read_graph(folder / "model.onnx")

    def size(value: ir.Value) -> int:
        is_size = value.dtype == ir.DataType.INT64 or value.name == "max"
        return 0 if value.producer() is None else 8 if is_size else BYTES

    outputs = frozenset(graph.graph.outputs)
    engine = EngineGraph(graph.nodes, reads, size, outputs, graph.are_alike, shapes=shapes)
    if in_order:
        assert [node.op_type for node in optimize(engine, overwrites=True).order] == kernels
    ours = arena_bytes(engine, lambda node: ())
    if "mem_in_use_peak" in events[0]["args"]:
        used = max(int(event["args"]["mem_in_use_peak"]) for event in events)
        assert round(used / CHUNK) == round(ours / BYTES)
