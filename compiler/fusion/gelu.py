"""Finds decomposed Gelu (Hendrycks and Gimpel, 2016), in either of its forms.

The exact one is x (1 + erf(x / sqrt(2))) / 2. The approximation is x (1 + tanh(sqrt(2 / pi) (x + 0.044715 x^3))) / 2.
"""

from __future__ import annotations

import math

import onnx_ir as ir

from splitc.compiler.graphs.matching import combined, constant, input_orders, is_onnx, made_by, only_user, other_input
from splitc.compiler.nodes import inputs_of
from splitc.compiler.patterns.operand import factor_of

# The relative tolerance of constants, which may be rounded to float16.
CLOSE = 1e-3
ROOT, CUBE = math.sqrt(2 / math.pi), 0.044715


def find_by_erf(erf: ir.Node) -> tuple[ir.Value, ir.Value] | None:
    """The input and the output of a decomposed Gelu around an Erf; None if the Erf is part of none."""
    product = factor_of(made_by(erf.inputs[0], "Mul", "Div")) if is_onnx(erf, "Erf") else None
    if product is None or not math.isclose(product[1], math.sqrt(0.5), rel_tol=CLOSE):
        return None
    data, first = product[0], _times_one_more(erf.outputs[0])
    if first is None:
        return None
    if _is_half_of(first[0], data):
        return data, first[1]
    second = combined(first[1], "Mul")
    if second is None:
        return None
    halved = (first[0] is data and constant(second[0]) == 0.5) or (constant(first[0]) == 0.5 and second[0] is data)
    return (data, second[1]) if halved else None


def find_by_tanh(tanh: ir.Node) -> tuple[ir.Value, ir.Value] | None:
    """The input and the output of a decomposed Gelu around a Tanh; None if the Tanh is part of none."""
    data = _scaled_cubic(tanh.inputs[0]) if is_onnx(tanh, "Tanh") else None
    product = None if data is None else _times_one_more(tanh.outputs[0])
    return (data, product[1]) if data is not None and product and _is_half_of(product[0], data) else None


def _times_one_more(value: ir.Value) -> tuple[ir.Value, ir.Value] | None:
    """In (1 + value) x factor: the factor and the product; None if the value has other readers."""
    more = only_user(value, "Add")
    return combined(more.outputs[0], "Mul") if more is not None and 1.0 in map(constant, more.inputs) else None


def _scaled_cubic(value: ir.Value | None) -> ir.Value | None:
    """The x of ROOT (x + CUBE x^3), with x^3 as a power, or as ROOT x (1 + CUBE x x)."""
    product = made_by(value, "Mul")
    if product is None:
        return None
    total = _multiple(value, ROOT)
    if total is not None:
        return _cubed(total)
    for one, other in input_orders(product):
        data = _multiple(one, ROOT)
        if data is not None and _is_one_and_square(other, data):
            return data
    return None


def _cubed(value: ir.Value) -> ir.Value | None:
    """The x of x + CUBE x^3."""
    total = made_by(value, "Add")
    for data, more in () if total is None else input_orders(total):
        power = made_by(_multiple(more, CUBE), "Pow")
        if power is not None and power.inputs[0] is data and constant(power.inputs[1]) == 3:
            return data
    return None


def _is_one_and_square(value: ir.Value | None, data: ir.Value) -> bool:
    """Whether a value is 1 + CUBE x x of a value x."""
    total = made_by(value, "Add")
    if total is None or 1.0 not in map(constant, total.inputs):
        return False
    square = next((made_by(one, "Mul") for one in inputs_of(total) if constant(one) is None), None)
    other = other_input(square, data) if square is not None and data in square.inputs else None
    return _multiple(other, CUBE) is data


def _multiple(value: ir.Value | None, number: float) -> ir.Value | None:
    """The x of a value x times `number`; None for any other value."""
    scaling = factor_of(made_by(value, "Mul"))
    is_close = scaling is not None and math.isclose(scaling[1], number, rel_tol=CLOSE)
    return scaling[0] if scaling is not None and is_close else None


def _is_half_of(value: ir.Value, data: ir.Value) -> bool:
    return factor_of(made_by(value, "Mul")) == (data, 0.5)
