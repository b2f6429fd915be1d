"""The products with their own sigmoid that ONNX Runtime makes one node, a QuickGelu."""

from __future__ import annotations

from collections import Counter
from collections.abc import Container, Sequence

import onnx_ir as ir

from splitc.compiler.execution.liveness import Reads
from splitc.compiler.fusion.operand import factor_of


def find_silus(
    nodes: Sequence[ir.Node], reads: Reads, kept: Container[ir.Value]
) -> tuple[list[ir.Node], Reads, set[ir.Node]]:
    """The nodes with one for each x sigmoid(x) or x sigmoid(a x), what each reads then, and these.

    Nothing else reads what is between, nor is it `kept` (QuickGeluFusion, core/optimizer/quick_gelu_fusion.cc). In half
    precision kernels for CPUs have casts between the nodes.
    """
    readers = Counter(value for node in nodes for value in reads(node))
    silus = set[ir.Node]()
    between = set[ir.Value]()
    for node in nodes:
        if node.op_type == "Mul" and not node.domain and node.outputs[0].dtype == ir.DataType.FLOAT:
            for gate, data in (node.inputs, node.inputs[::-1]):
                inner = _gates(gate, data)
                if data is not None and inner and all(readers[v] == 1 and v not in kept for v in inner):
                    silus.add(node)
                    between.update(inner)
                    break

    def read(node: ir.Node) -> list[ir.Value]:
        return [value for value in reads(node) if value not in between]

    return [node for node in nodes if node.outputs[0] not in between], read, silus


def _gates(gate: ir.Value | None, data: ir.Value | None) -> list[ir.Value]:
    """The values between x and sigmoid(x), or sigmoid(a x), which is the last one; none if it is something else."""
    node = gate.producer() if gate is not None else None
    if gate is None or node is None or node.op_type != "Sigmoid" or node.inputs[0] is None:
        return []
    if node.inputs[0] is data:
        return [gate]
    scaled = node.inputs[0].producer()
    scaling = factor_of(scaled) if scaled is not None and scaled.op_type == "Mul" else None
    return [node.inputs[0], gate] if scaling is not None and scaling[0] is data else []
