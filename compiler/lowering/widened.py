"""Computes bfloat16 in float32 on GPUs, where ONNX Runtime's CUDA provider has no kernel for bfloat16.

Its CPU provider has hardly any either, so ONNX Runtime would not load such a graph. Kernels for bfloat16 compute in
float32 too, and round their results once.
"""

from __future__ import annotations

import onnx_ir as ir

from splitc.compiler.frontend.editor import Editor
from splitc.compiler.frontend.origins import described
from splitc.compiler.operators.gpu_kernels import has_gpu_kernel

NARROW, WIDE = ir.DataType.BFLOAT16, ir.DataType.FLOAT


def widen(node: ir.Node, editor: Editor) -> None:
    """Insert casts around a node that has a kernel for float32, but none for bfloat16, in place."""
    types = [None if value is None else described(value).dtype for value in node.inputs]
    if NARROW not in types[:1] or has_gpu_kernel(node, NARROW) or not has_gpu_kernel(node, WIDE):
        return
    for number, (value, dtype) in enumerate(zip(node.inputs, types, strict=True)):
        if dtype == NARROW:
            wide = editor.before(node, "Cast", value, to=WIDE, dtype=WIDE)
            assert value is not None
            wide.shape = value.shape
            node.replace_input_with(number, wide)
    for value in node.outputs:
        if described(value).dtype == NARROW:
            editor.wrap(value, "Cast", [value], "wide", to=NARROW)
            value.type = ir.TensorType(WIDE)
