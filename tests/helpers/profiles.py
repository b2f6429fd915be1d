"""ONNX Runtime's profile of a run: its nodes, and their bytes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import onnx_ir as ir
import onnxruntime as ort


def profile(path: Path, feeds: dict[str, Any], folder: Path, optimized: bool = False) -> list[dict[str, Any]]:
    """The nodes of a run in the order of execution. Without `optimized` they are the file's."""
    options = ort.SessionOptions()
    if not optimized:
        options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    options.enable_profiling = True
    options.profile_file_prefix = str(folder / "profile")
    options.enable_mem_pattern = options.enable_mem_reuse = False
    session = ort.InferenceSession(path, options, providers=["CPUExecutionProvider"])
    session.run(None, feeds)
    events = json.loads(Path(session.end_profiling()).read_text())
    nodes = [event for event in events if event["cat"] == "Node" and event["name"].endswith("_kernel_time")]
    return sorted(nodes, key=lambda event: event["ts"])


def named(model: ir.Model) -> ir.Model:
    for number, node in enumerate(model.graph):
        node.name = f"node{number}"
    return model


def reads(node: ir.Node) -> list[ir.Value]:
    return [value for value in node.inputs if value is not None]
