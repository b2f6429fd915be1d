"""The bytes of a run's values by the plan's rules, against what ONNX Runtime's profile says."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import onnx_ir as ir
from onnx_ir.passes.common import ShapeInferencePass

from models.writer import Writer, save
from splitc.compiler.execution.arena import FIRST_REGION
from splitc.compiler.execution.engine_graph import EngineGraph, NodeShapes
from splitc.compiler.execution.optimized import optimize
from splitc.compiler.execution.run import arena_bytes
from tests.helpers.graphs import read_graph
from tests.helpers.profiles import named, profile, reads

# Values of one and a half: a region that is large enough has twice that of the first one, and no room for another.
BYTES, CHUNK = 3 * FIRST_REGION // 2, 2 * FIRST_REGION


def assert_bytes_are_those_in_use(
    w: Writer,
    feeds: dict[str, Any],
    folder: Path,
    kernels: list[str] | None,
    shapes: NodeShapes | None = None,
    in_order: bool = False,
) -> None:
    """Run a model whose values are of BYTES, or of nearly none, and compare with the bytes in use.

    It runs in these `kernels`, or, where it is None, in those of an operator's function. If they are `in_order`, the
    plan's nodes are those too.
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
