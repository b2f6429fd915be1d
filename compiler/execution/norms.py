"""Norms: those that ONNX Runtime fuses with the residual addition before them, and those without a kernel.

The latter are expanded to the nodes of their function.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import onnx_ir as ir

from splitc.compiler.execution.liveness import Alike, Nodes, Reads, Size
from splitc.compiler.frontend.matching import is_onnx, made_by

DOMAIN = "splitc.step"


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


@dataclass(frozen=True)
class Inlined:
    """The nodes with the inlined ones, the values that each reads, and the bytes of the new values."""

    nodes: Sequence[ir.Node]
    reads: Reads
    bytes: Mapping[ir.Value, int]


def inline(nodes: Sequence[ir.Node], reads: Reads, size: Size) -> Inlined:
    """Insert the nodes of GroupNormalization before it; it stands for the last of them.

    They cast, center and square the image, divide what is centered, cast it back, and scale it (the operator's function
    in onnx/defs/nn/defs.cc). The cast image lives until the quotient is reshaped.
    """
    if not any(is_onnx(node, "GroupNormalization") for node in nodes):
        return Inlined(nodes, reads, {})
    inlined, own, bytes_ = list[ir.Node](), dict[ir.Node, list[ir.Value]](), dict[ir.Value, int]()

    def step(name: str, size: int, *read: ir.Value) -> ir.Value:
        node = ir.Node(DOMAIN, name, (), [ir.AttrInt64("number", len(own))], num_outputs=1)
        own[node], bytes_[node.outputs[0]] = list(read), size
        inlined.append(node)
        return node.outputs[0]

    for node in nodes:
        if is_onnx(node, "GroupNormalization"):
            given, image = list(reads(node)), size(node.outputs[0])
            cast = step("Cast", image, given[0])
            centered = step("Sub", image, cast)
            deviation = step("ReduceMean", 1, step("Mul", image, cast))
            quotient = step("Div", image, centered, deviation, cast)
            own[node] = [step("Mul", image, step("Cast", image, quotient)), *given[1:]]
        inlined.append(node)
    return Inlined(inlined, lambda node: own[node] if node in own else reads(node), bytes_)
