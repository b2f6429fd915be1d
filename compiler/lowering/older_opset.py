"""Lowers the opset of engines for GPUs, where ONNX Runtime has CUDA kernels only for an operator's older version.

ONNX's opset 22 adds bfloat16 to many operators, and changes nothing else about them. ONNX Runtime registers some of its
CUDA kernels for the older version alone: a MaxPool of opset 22 runs on the CPU, and one of opset 21 on the GPU.
"""

from __future__ import annotations

import onnx
import onnx_ir as ir

from splitc.compiler.frontend.origins import described
from splitc.compiler.frontend.reads import all_nodes
from splitc.compiler.operators.gpu_kernels import LAST_OPSET, is_too_new


def use_older_opset(graph: ir.Graph) -> None:
    """Make a graph import opset `LAST_OPSET`, in place, if nodes get CUDA kernels by it and all compute the same."""
    opset = graph.opset_imports.get("", 1)
    if any(map(is_too_new, graph)) and all(_means_the_same(node, opset) for node in all_nodes(graph)):
        graph.opset_imports[""] = LAST_OPSET


def _means_the_same(node: ir.Node, opset: int) -> bool:
    """Whether a node computes the same in opset `LAST_OPSET`: its types and attributes exist there.

    Opsets 22 to 25 added types, and otherwise changed only operators that got other attributes.
    """
    if node.domain:
        return True
    try:
        new, old = (onnx.defs.get_schema(node.op_type, version) for version in (opset, LAST_OPSET))
    except onnx.defs.SchemaError:  # there was none
        return False
    if new.since_version == old.since_version:
        return True
    return node.attributes.keys() <= old.attributes.keys() and all(
        value is None or _takes(old, number, value) for number, value in enumerate(node.inputs)
    )


def _takes(schema: onnx.defs.OpSchema, number: int, value: ir.Value) -> bool:
    """Whether an operator accepts a value's type as this input. The last input of a schema may be variadic."""
    dtype = described(value).dtype
    allowed = schema.inputs[min(number, len(schema.inputs) - 1)].types
    return dtype is not None and f"tensor({dtype.name.lower()})" in allowed
