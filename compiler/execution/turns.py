"""Pairs of transposes that cancel, which ONNX Runtime removes, also with elementwise nodes between them."""

from __future__ import annotations

import onnx_ir as ir

from splitc.compiler.execution.liveness import Nodes, Size
from splitc.compiler.frontend.matching import is_onnx

# What goes element by element, and so may come before a transpose as well as behind it.
_BETWEEN = ("Add", "Sub", "Mul", "Div", "Cast", "Relu", "Sigmoid", "Tanh", "Neg", "Sqrt")
# Bytes of what may be turned with it: a number, or a few.
_SMALL = 256


def find_turned_back(nodes: Nodes, size: Size) -> dict[ir.Value, ir.Value]:
    """The results of transposes that are removed, each with the value that replaces it.

    The values between the two have no other readers. They differ from those before only in the order of their axes
    (core/optimizer/transpose_optimization).
    """
    made = {value for node in nodes.order for value in node.outputs}
    same: dict[ir.Value, ir.Value] = {}
    for last in nodes.order:
        if last.op_type != "Transpose" or last.inputs[0] is None or last.outputs[0] in nodes.kept:
            continue
        value = last.inputs[0]
        while value in made and nodes.only_reader(value) is not None and value not in same:
            node = value.producer()
            assert node is not None
            if is_onnx(node, "Transpose"):
                if node.inputs[0] is not None and _undoes(last, node):
                    same[value], same[last.outputs[0]] = node.inputs[0], last.inputs[0]
                break
            large = [one for one in nodes.reads(node) if one in made and size(one) > _SMALL]
            if not is_onnx(node, *_BETWEEN) or len(large) != 1:
                break
            (value,) = large
    return same


def _undoes(last: ir.Node, first: ir.Node) -> bool:
    one, other = (node.attributes.get_ints("perm", ()) for node in (first, last))
    return len(one) == len(other) > 0 and [one[axis] for axis in other] == list(range(len(one)))
