"""Products x sigmoid(x), which ONNX Runtime fuses to a QuickGelu."""

from __future__ import annotations

import onnx_ir as ir

from splitc.compiler.execution.liveness import Nodes
from splitc.compiler.frontend.matching import is_onnx, made_by, value_before
from splitc.compiler.frontend.walks import producer_of
from splitc.compiler.fusion.operand import factor_of


def find_silus(nodes: Nodes) -> tuple[Nodes, set[ir.Node]]:
    """The nodes with one for each x sigmoid(x) or x sigmoid(a x), and these.

    The values between have no other readers (QuickGeluFusion, core/optimizer/quick_gelu_fusion.cc). In half precision
    on CPUs, casts between the nodes prevent it.
    """
    silus = set[ir.Node]()
    between = set[ir.Value]()
    for node in nodes.order:
        if is_onnx(node, "Mul") and node.outputs[0].dtype == ir.DataType.FLOAT:
            for gate, data in (node.inputs, node.inputs[::-1]):
                inner = _gates(gate, data)
                if data is not None and inner and all(map(nodes.only_reader, inner)):
                    silus.add(node)
                    between.update(inner)
                    break

    def read(node: ir.Node) -> list[ir.Value]:
        return [value for value in nodes.reads(node) if value not in between]

    return nodes.without({producer_of(value) for value in between}, read), silus


def _gates(gate: ir.Value | None, data: ir.Value | None) -> list[ir.Value]:
    """The values from x to sigmoid(x) or sigmoid(a x), the last one included; none for any other pattern."""
    inner = value_before(gate, "Sigmoid")
    if gate is None or inner is None or inner is data:
        return [] if gate is None or inner is None else [gate]
    scaling = factor_of(made_by(inner, "Mul"))
    return [inner, gate] if scaling is not None and scaling[0] is data else []
