"""Operators without a kernel, expanded to the nodes of their function, as ONNX Runtime does."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import onnx_ir as ir

from splitc.compiler.execution.liveness import Reads, Size
from splitc.compiler.frontend.matching import is_onnx

DOMAIN = "splitc.step"


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
