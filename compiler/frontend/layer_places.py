"""Where a layer has its input and result in floating point, so that an adapter's update can be added."""

from __future__ import annotations

from dataclasses import dataclass

import onnx_ir as ir

from splitc.compiler.frontend.matching import made_by, only_user, other_input, value_before

# Products of dynamically quantized inputs.
_INTEGER = ("MatMulInteger", "ConvInteger")
_TO_FLOAT = ("com.microsoft", "MatMulIntegerToFloat")


@dataclass(frozen=True)
class Place:
    """A node that multiplies by a layer's weight, the layer's input `data`, and the producer `last` of its result.

    These are the node's own input and the node itself, unless the input is quantized dynamically.
    """

    node: ir.Node
    data: ir.Value
    last: ir.Node


def place_of(node: ir.Node) -> Place | str:
    """The place of a node that multiplies by a weight, or the reason why it has none."""
    data = node.inputs[0]
    if data is None or node.attributes.get_int("transA", 0) == 1:
        return "its input is transposed (transA)"
    if (groups := node.attributes.get_int("group", 1)) != 1:
        return f"its convolution has {groups} groups"
    if "activation" in node.attributes:
        return "its activation is fused into it"
    if node.op_type.startswith("QLinear"):
        return "its output is quantized"
    if node.op_type not in _INTEGER and (node.domain, node.op_type) != _TO_FLOAT:
        return Place(node, data, node)
    quantize, source = made_by(data, "DynamicQuantizeLinear"), value_before(data, "DynamicQuantizeLinear")
    if quantize is None or source is None or data is not quantize.outputs[0]:
        return "its input is not quantized by a DynamicQuantizeLinear"
    last = node if node.op_type not in _INTEGER else _scaled(node, quantize.outputs[1])
    return (
        Place(node, source, last)
        if last is not None
        else "its integer result is not followed by a Cast and a product with both scales"
    )


def _scaled(node: ir.Node, scale: ir.Value) -> ir.Node | None:
    """The producer of the integer product times the input's `scale` and a constant; None if there is none.

    The integers are cast to floating point first. The two factors may be multiplied with each other before.
    """
    last = only_user(node.outputs[0], "Cast")
    factors: list[ir.Value] = []
    while last is not None and len(factors) < 2:
        made = last.outputs[0]
        last = only_user(made, "Mul")
        other = None if last is None else other_input(last, made)
        if other is None:
            return None
        factors += _leaves(other)
    constants = [value for value in factors if value.is_initializer()]
    return last if len(factors) == 2 and len(constants) == 1 and any(value is scale for value in factors) else None


def _leaves(value: ir.Value) -> list[ir.Value]:
    """The factors of a product of two values; for any other value, the value."""
    maker = made_by(value, "Mul")
    return [value] if maker is None else [factor for factor in maker.inputs if factor is not None]
