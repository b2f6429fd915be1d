"""Engines for ONNX Runtime: the stage's graph as an ONNX file, its weights beside it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import onnx_ir as ir

# Smaller weights stay in the ONNX file, where constant folding and shape inference see them.
SMALL = 1024


def write_engine(graph: ir.Graph, source: ir.Model, path: Path, progress: Callable[[int], None]) -> None:
    """Write `graph` to `path` and its weights to a file of the same name with the ending `.weights`.

    The weights are streamed from where they are. `progress` is told the bytes of each weight as it is written.
    """
    model = ir.Model(
        graph,
        ir_version=source.ir_version,
        producer_name="splitc",
        domain=source.domain,
        model_version=source.model_version,
        metadata_props=dict(source.metadata_props),
    )
    path.parent.mkdir(parents=True, exist_ok=True)
    ir.save(
        model,
        path,
        external_data=path.with_suffix(".weights").name,
        size_threshold_bytes=SMALL,
        callback=lambda tensor, _: progress(tensor.nbytes),
    )
