"""Gelu as exporters write it out by the error function: x (1 + erf(x / sqrt(2))) / 2."""

from __future__ import annotations

import math

import onnx_ir as ir

from splitc.compiler.fusion.norm import only_user, other_input
from splitc.compiler.fusion.operand import constant, factor_of

# Relative, of a constant in half precision.
CLOSE = 1e-3


def find_written(erf: ir.Node) -> tuple[ir.Value, ir.Value] | None:
    """What a Gelu that is written out around an Erf reads and makes. None if the node is no such Erf."""
    scaled = erf.inputs[0].producer() if erf.op_type == "Erf" and not erf.domain and erf.inputs[0] is not None else None
    product = factor_of(scaled) if scaled is not None and scaled.op_type in ("Mul", "Div") else None
    if product is None or not math.isclose(product[1], math.sqrt(0.5), rel_tol=CLOSE):
        return None
    data, more = product[0], only_user(erf.outputs[0], "Add")
    if more is None or 1.0 not in map(constant, more.inputs):
        return None
    first = only_user(more.outputs[0], "Mul")
    other = None if first is None else other_input(first, more.outputs[0])
    if first is None or other is None:
        return None
    if _is_half_of(other, data):
        return data, first.outputs[0]
    second = only_user(first.outputs[0], "Mul")
    last = None if second is None else other_input(second, first.outputs[0])
    if second is None or last is None:
        return None
    halved = (other is data and constant(last) == 0.5) or (constant(other) == 0.5 and last is data)
    return (data, second.outputs[0]) if halved else None


def _is_half_of(value: ir.Value, data: ir.Value) -> bool:
    node = value.producer()
    return node is not None and node.op_type == "Mul" and not node.domain and factor_of(node) == (data, 0.5)
