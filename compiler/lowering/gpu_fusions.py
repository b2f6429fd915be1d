"""Fuses operators in an engine for ONNX Runtime on GPUs, after the model was cut."""

from __future__ import annotations

from collections.abc import Mapping

import onnx_ir as ir

from splitc.compiler.lowering.bias_gelu import fuse_bias_gelus
from splitc.compiler.lowering.channels_last import use_channels_last
from splitc.compiler.lowering.gated_gelus import fuse_gated_gelus
from splitc.compiler.lowering.skip_norms import fuse_skips
from splitc.compiler.request.shapes import Shape


def fuse_for_gpus(graph: ir.Graph, shapes: Mapping[str, Shape]) -> None:
    """Replace operators by those that are faster on GPUs, in place.

    `shapes` are those of the model's values. Nodes that have no reader afterwards stay.
    """
    fuse_skips(graph)
    fuse_gated_gelus(graph, shapes)
    fuse_bias_gelus(graph)
    use_channels_last(graph, shapes)
