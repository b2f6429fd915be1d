"""Writes engines for GPUs with an older opset, where ONNX Runtime's kernels have not followed the newest.

ONNX's opset 22 lets many operators take bfloat16, and changes nothing else about them. ONNX Runtime has no kernel for
GPUs for some in their new version: a MaxPool of opset 22 runs on the CPU, and one of opset 21 on the GPU.
"""

from __future__ import annotations

import onnx
import onnx_ir as ir

from splitc.compiler.frontend.origins import described
from splitc.compiler.frontend.reads import all_nodes
from splitc.compiler.operators.gpu_kernels import LAST_OPSET, is_too_new


def use_older_opset(graph: ir.Graph) -> None:
    """Let an engine's graph import opset `LAST_OPSET`, in place, if that gives nodes a kernel and means the same."""
    opset = graph.opset_imports.get("", 1)
    if any(map(is_too_new, graph)) and all(_means_the_same(node, opset) for node in all_nodes(graph)):
        graph.opset_imports[""] = LAST_OPSET


def _means_the_same(node: ir.Node, opset: int) -> bool:
    """Whether a node of this opset means the same in opset `LAST_OPSET`, which must know its types and attributes.

    Where ONNX kept an operator's attributes, opsets 22 to 25 only added types.
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
    """Whether an operator takes values of this type as this input. The last one may stand for several."""
    dtype = described(value).dtype
    allowed = schema.inputs[min(number, len(schema.inputs) - 1)].types
    return dtype is not None and f"tensor({dtype.name.lower()})" in allowed
