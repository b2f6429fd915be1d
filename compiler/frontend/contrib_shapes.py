"""Shape functions of ONNX Runtime's own operators that onnx-shape-inference lacks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import onnx_ir as ir
from onnx_shape_inference import registry

Rule = Callable[[Any, ir.Node], None]
DOMAIN = "com.microsoft"


def add_shape_functions() -> None:
    """Register them, but for those that the library has by now."""
    for operator, rule in RULES.items():
        if not registry.has(DOMAIN, operator):
            registry.register(DOMAIN, operator)(rule)


def _quantize(context: Any, node: ir.Node) -> None:
    """The shape of the data, and the type of the zero point: uint8 where there is none."""
    data, zero = node.inputs[0], node.inputs[2] if len(node.inputs) > 2 else None
    dtype = ir.DataType.UINT8 if zero is None or zero.dtype is None else zero.dtype
    if data is not None and data.shape is not None:
        context.set_shape_and_dtype(node.outputs[0], data.shape, dtype)


def _dequantize(context: Any, node: ir.Node) -> None:
    """The shape of the data, and the type of the scale."""
    data, scale = node.inputs[0], node.inputs[1]
    if data is not None and data.shape is not None and scale is not None and scale.dtype is not None:
        context.set_shape_and_dtype(node.outputs[0], data.shape, scale.dtype)


def _integer_product(context: Any, node: ir.Node) -> None:
    """As a MatMul, in the type of the first scale."""
    registry.get("", "MatMul", 13)(context, node)  # type: ignore[misc]  # which is there
    if (scale := node.inputs[2]) is not None and scale.dtype is not None:
        node.outputs[0].dtype = scale.dtype


def _gather_blocks(context: Any, node: ir.Node) -> None:
    """As a Gather, in the type of the scales. Numbers of few bits lie several in a byte, along the last axis."""
    data, indices, scales = node.inputs[:3]
    assert data is not None and indices is not None and scales is not None
    if data.shape is None or indices.shape is None or scales.dtype is None:
        return
    axis, sizes = node.attributes.get_int("gather_axis", 0), list(data.shape)
    if data.dtype == ir.DataType.UINT8:
        packed = 8 // node.attributes.get_int("bits", 4)
        sizes[-1] = sizes[-1] * packed
    shape = [*sizes[:axis], *indices.shape, *sizes[axis + 1 :]]
    context.set_shape_and_dtype(node.outputs[0], ir.Shape(shape), scales.dtype)


RULES: dict[str, Rule] = {
    "DequantizeLinear": _dequantize,
    "GatherBlockQuantized": _gather_blocks,
    "MatMulIntegerToFloat": _integer_product,
    "QuantizeLinear": _quantize,
}
