"""Fuses operators in an engine for ONNX Runtime on GPUs, after the model was cut."""

from __future__ import annotations

from collections.abc import Mapping

import onnx_ir as ir

from splitc.compiler.frontend.graph import Graph
from splitc.compiler.frontend.origins import described, note_sizes
from splitc.compiler.frontend.unused import remove_unused
from splitc.compiler.lowering.channels_last import use_channels_last
from splitc.compiler.lowering.fused_rows import fuse_rows
from splitc.compiler.lowering.gelus import fuse_bias_gelus, fuse_gated_gelus
from splitc.compiler.lowering.gpu_functions import OPSET
from splitc.compiler.lowering.skip_norms import fuse_skips
from splitc.compiler.lowering.summed_products import sum_products
from splitc.compiler.operators.registry import operator_of
from splitc.compiler.request.shapes import Shape


def fuse_for_gpus(graph: ir.Graph, shapes: Mapping[str, Shape]) -> None:
    """Replace operators by those that are faster on GPUs, in place.

    `shapes` are those of the model's values. Nodes that have no reader afterwards stay.
    """
    sum_products(graph, shapes)
    fuse_skips(graph)
    if graph.opset_imports.get("", 1) >= OPSET:
        fuse_gated_gelus(graph, shapes)
        use_channels_last(graph, shapes)
    fuse_bias_gelus(graph)


def fused_away(model: Graph, shapes: Mapping[str, Shape]) -> frozenset[ir.Node]:
    """The model's nodes that leave no result in engines for GPUs, where other operators do their work.

    A product always counts, since two that are joined take as long as before, and so does a norm.
    """
    engine = model.graph.clone()
    for value in (value for node in engine for value in node.outputs):
        note_sizes(value, value.shape)
    fuse_for_gpus(engine, shapes)
    remove_unused(engine)
    fuse_rows(engine, shapes)
    remove_unused(engine)
    left = {described(value) for node in engine for value in node.outputs}
    gone = (node for node in model.nodes if left.isdisjoint(node.outputs))
    return frozenset(node for node in gone if operator_of(node).flops is None and not operator_of(node).is_norm)
