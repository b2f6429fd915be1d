"""Looks around a Softmax for products that could make it part of an attention."""

from __future__ import annotations

import onnx_ir as ir

from splitc.compiler.fusion.product import is_product


def readers_of(value: ir.Value) -> list[ir.Node]:
    """The nodes that read a value, except those that read only its sizes."""
    return [node for node in dict.fromkeys(node for node, _ in value.uses()) if node.op_type != "Shape"]


def weighs(value: ir.Value) -> bool:
    """Whether a product with a computed value follows within a few nodes of a Softmax."""
    level = [value]
    for _ in range(6):
        readers = [node for one in level for node in readers_of(one)]
        if any(is_product(node) for node in readers):
            return True
        ends = ("TopK", "ReduceSum", "ArgMax", "Gather")
        level = [node.outputs[0] for node in readers if not node.domain and node.op_type not in ends]
    return False


def comes_from_product(value: ir.Value) -> bool:
    """Whether a product of two computed values precedes a Softmax within a few nodes."""
    level = [value]
    for _ in range(10):
        above = [node for one in level if (node := one.producer()) is not None]
        if any(is_product(node) for node in above):
            return True
        passing = (node for node in above if not node.domain and node.op_type not in ("MatMul", "Gemm", "Conv"))
        level = [one for node in passing for one in node.inputs[:2] if one]
    return False
