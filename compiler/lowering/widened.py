"""Computes in another type on GPUs, where ONNX Runtime's CUDA provider has no kernel for a node's own.

It has few for bfloat16, and its CPU provider has hardly any either, so ONNX Runtime would not load such a graph. Of
float16 it lacks GridSample. Kernels for halves compute in float32 too, and round their results once. Nodes with small
integers or booleans would run on the CPU, and keep a graph from being captured. A wider type has the same results, to
the bit.
"""

from __future__ import annotations

import onnx_ir as ir

from splitc.compiler.frontend.editor import Editor
from splitc.compiler.frontend.origins import described
from splitc.compiler.operators.gpu_kernels import HALVES, has_gpu_kernel, typed_input

NARROW, WIDE = ir.DataType.BFLOAT16, ir.DataType.FLOAT
_INT32, _INT64, _DOUBLE = ir.DataType.INT32, ir.DataType.INT64, ir.DataType.DOUBLE
# Wider types by type, the best first.
WIDER = {
    **dict.fromkeys(HALVES, (WIDE,)),
    ir.DataType.BOOL: (ir.DataType.UINT8, _INT32, _DOUBLE),
    **dict.fromkeys((ir.DataType.INT8, ir.DataType.UINT8, ir.DataType.INT16), (_INT32, _INT64, _DOUBLE)),
    **dict.fromkeys((_INT32, ir.DataType.UINT32), (_INT64, _DOUBLE)),
}
# The operators that compute the same in a wider type, other than halves: they compare, choose or move.
EXACT = frozenset(
    {
        *("Equal", "Greater", "GreaterOrEqual", "Less", "LessOrEqual", "Max", "Min", "Mod", "Clip"),
        *("DepthToSpace", "SpaceToDepth", "GatherND", "Pad", "ReduceMax", "ReduceMin", "Tile", "Where"),
        *("ArgMax", "ArgMin", "Relu"),
    }
)


def widen(node: ir.Node, editor: Editor) -> None:
    """Insert casts around a node, perhaps in a branch, that has a kernel for a wider type but none for its own."""
    first, types = typed_input(node), [None if value is None else described(value).dtype for value in node.inputs]
    narrow = types[first] if len(types) > first else None
    if narrow not in WIDER or has_gpu_kernel(node, narrow):
        return
    wide = next((dtype for dtype in WIDER[narrow] if has_gpu_kernel(node, dtype)), None)
    if wide is None or (narrow not in HALVES and (node.domain or node.op_type not in EXACT)):
        return
    for number, (value, dtype) in enumerate(zip(node.inputs, types, strict=True)):
        if dtype == narrow and number >= first:
            cast = editor.before(node, "Cast", value, to=wide, dtype=wide)
            assert value is not None
            cast.name, cast.shape = f"{node.outputs[0].name}/wide{number}", value.shape  # unlike those around a branch
            node.replace_input_with(number, cast)
    for value in node.outputs:
        if described(value).dtype == narrow:
            editor.wrap(value, "Cast", [value], "wide", to=narrow)
            value.type = ir.TensorType(wide)
