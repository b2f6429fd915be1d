"""Norms that ONNX Runtime fuses with the residual addition before them."""

from __future__ import annotations

import onnx_ir as ir

from splitc.compiler.execution.liveness import Alike, Nodes
from splitc.compiler.frontend.matching import is_onnx, made_by


def find_normed_sums(nodes: Nodes, alike: Alike) -> tuple[Nodes, frozenset[ir.Node]]:
    """The nodes with one for each norm and its addition, and these norms.

    The sum has no other reader, and both summands have three axes and the same shape (SkipLayerNormFusion,
    core/optimizer/skip_layer_norm_fusion.cc).
    """
    there = set(nodes.order)
    additions: dict[ir.Node, ir.Node] = {}
    for node in nodes.order:
        total = node.inputs[0] if is_onnx(node, "LayerNormalization") else None
        maker = made_by(total, "Add")
        if total is None or maker is None or maker not in there:
            continue
        one, other = maker.inputs
        if one is None or other is None or nodes.only_reader(total) is None:
            continue
        if one.shape is not None and len(one.shape) == 3 and alike(one, other):
            additions[node] = maker
    inner = set(additions.values())

    def read(node: ir.Node) -> list[ir.Value]:
        if node not in additions:
            return list(nodes.reads(node))
        return [*nodes.reads(additions[node]), *(value for value in nodes.reads(node) if value is not node.inputs[0])]

    return nodes.without(inner, read), frozenset(additions)
