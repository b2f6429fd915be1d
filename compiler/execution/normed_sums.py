"""The norms that ONNX Runtime makes one node with the addition before them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Container, Sequence

import onnx_ir as ir

from splitc.compiler.execution.engine_graph import Alike
from splitc.compiler.execution.liveness import Reads


def find_normed_sums(
    nodes: Sequence[ir.Node], reads: Reads, kept: Container[ir.Value], alike: Alike
) -> tuple[list[ir.Node], Reads, frozenset[ir.Node]]:
    """The nodes with one for each norm and its sum, what each reads then, and these norms.

    Nothing else reads the sum, it is not `kept`, and its sides have three axes and the same shape (SkipLayerNormFusion,
    core/optimizer/skip_layer_norm_fusion.cc).
    """
    readers = Counter(value for node in nodes for value in reads(node))
    there = set(nodes)
    additions: dict[ir.Node, ir.Node] = {}
    for node in nodes:
        total = node.inputs[0] if node.op_type == "LayerNormalization" and not node.domain else None
        maker = total.producer() if total is not None else None
        if total is None or maker not in there or maker is None or maker.op_type != "Add" or maker.domain:
            continue
        one, other = maker.inputs
        if one is None or other is None or readers[total] != 1 or total in kept:
            continue
        if one.shape is not None and len(one.shape) == 3 and alike(one, other):
            additions[node] = maker
    inner = set(additions.values())

    def read(node: ir.Node) -> list[ir.Value]:
        if node not in additions:
            return list(reads(node))
        return [*reads(additions[node]), *(value for value in reads(node) if value is not node.inputs[0])]

    return [node for node in nodes if node not in inner], read, frozenset(additions)
