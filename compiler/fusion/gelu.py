"""Gelu as exporters write it out.

By the error function it is x (1 + erf(x / sqrt(2))) / 2, and by the hyperbolic tangent nearly the same:
x (1 + tanh(sqrt(2 / pi) (x + 0.044715 x^3))) / 2.
"""

from __future__ import annotations

import math

import onnx_ir as ir

from splitc.compiler.fusion.norm import only_user, other_input
from splitc.compiler.fusion.operand import constant, factor_of

# Relative, of a constant in half precision.
CLOSE = 1e-3
ROOT, CUBE = math.sqrt(2 / math.pi), 0.044715


def find_written(erf: ir.Node) -> tuple[ir.Value, ir.Value] | None:
    """The input and the output of a decomposed Gelu around an Erf; None if the Erf is part of none."""
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


def find_by_tanh(tanh: ir.Node) -> tuple[ir.Value, ir.Value] | None:
    """The input and the output of a decomposed Gelu around a Tanh; None if the Tanh is part of none."""
    inner = tanh.inputs[0].producer() if tanh.op_type == "Tanh" and not tanh.domain and tanh.inputs[0] else None
    more = only_user(tanh.outputs[0], "Add")
    if inner is None or inner.op_type != "Mul" or more is None or 1.0 not in map(constant, more.inputs):
        return None
    last = only_user(more.outputs[0], "Mul")
    half = None if last is None else other_input(last, more.outputs[0])
    data = _scaled_cubic(inner)
    if last is None or half is None or data is None or not _is_half_of(half, data):
        return None
    return data, last.outputs[0]


def _scaled_cubic(product: ir.Node) -> ir.Value | None:
    """The x of ROOT (x + CUBE x^3), with x^3 as a power, or as ROOT x (1 + CUBE x x)."""
    total = _multiple(product, ROOT)
    if total is not None:
        return _cubed(total.producer())
    for value, other in (product.inputs, reversed(product.inputs)):
        data = _multiple(value.producer() if value is not None else None, ROOT)
        if data is not None and other is not None and _is_one_and_square(other.producer(), data):
            return data
    return None


def _cubed(total: ir.Node | None) -> ir.Value | None:
    """The x of x + CUBE x^3."""
    for data, more in (total.inputs, reversed(total.inputs)) if total is not None and total.op_type == "Add" else ():
        power = _multiple(more.producer() if more is not None else None, CUBE)
        node = power.producer() if power is not None else None
        if node is not None and node.op_type == "Pow" and node.inputs[0] is data and constant(node.inputs[1]) == 3:
            return data
    return None


def _is_one_and_square(total: ir.Node | None, data: ir.Value) -> bool:
    """Whether a node computes 1 + CUBE x x of a value x."""
    if total is None or total.op_type != "Add" or 1.0 not in map(constant, total.inputs):
        return False
    square = next((value.producer() for value in total.inputs if value is not None and constant(value) is None), None)
    if square is None or square.op_type != "Mul" or data not in square.inputs:
        return False
    other = other_input(square, data)
    return other is not None and _multiple(other.producer(), CUBE) is data


def _multiple(node: ir.Node | None, number: float) -> ir.Value | None:
    """The value that a node multiplies by a number; None for any other node."""
    scaling = factor_of(node) if node is not None and node.op_type == "Mul" and not node.domain else None
    is_close = scaling is not None and math.isclose(scaling[1], number, rel_tol=CLOSE)
    return scaling[0] if scaling is not None and is_close else None


def _is_half_of(value: ir.Value, data: ir.Value) -> bool:
    node = value.producer()
    return node is not None and node.op_type == "Mul" and not node.domain and factor_of(node) == (data, 0.5)
