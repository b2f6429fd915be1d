"""The registry: the entries of all operators that splitc knows, by domain and name."""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from types import MappingProxyType

import onnx_ir as ir

from splitc.compiler.nodes import input_at, operator_name
from splitc.compiler.operators import (
    attention,
    elementwise,
    generators,
    images,
    indexing,
    linear,
    linear_attention,
    qlinear,
    quantized,
    recurrent,
    reduction,
    shaping,
    signals,
    tabular,
)
from splitc.compiler.operators.dequantized import is_fused
from splitc.compiler.operators.operation import Operation
from splitc.compiler.operators.operator import Operator
from splitc.compiler.operators.scratch import INT8_ACCURACY

FAMILIES = (
    attention,
    elementwise,
    generators,
    images,
    indexing,
    linear,
    linear_attention,
    qlinear,
    quantized,
    recurrent,
    reduction,
    shaping,
    signals,
    tabular,
)


def _collect() -> dict[str, Operator]:
    entries: dict[str, Operator] = {}
    for operator in (operator for family in FAMILIES for operator in family.OPERATORS):
        assert operator.name not in entries, f"{operator.name} has two entries"
        entries[operator.name] = operator
    return entries


REGISTRY: Mapping[str, Operator] = MappingProxyType(_collect())


def operator_of(node: ir.Node) -> Operator:
    """The entry of a node's operator; an empty one if it is not registered."""
    name = operator_name(node)
    return REGISTRY.get(name) or _unregistered(name)


@lru_cache(maxsize=256)
def _unregistered(name: str) -> Operator:
    return Operator(name)


def draws(node: ir.Node) -> bool:
    """Whether a node draws random numbers, or may."""
    operator = operator_of(node)
    if operator.random_if is None or operator.random_if >= len(node.inputs):
        return operator.random
    asked = node.inputs[operator.random_if]
    return asked is not None and (asked.const_value is None or bool(asked.const_value.numpy().any()))


def quantizes(node: ir.Node) -> bool:
    """Whether a node quantizes computed values, or ONNX Runtime does so for it.

    ONNX Runtime does so in a product with a quantized weight if the node permits it (`accuracy_level`), or if it fuses
    the product with the dequantization; and always for experts of 8 bits.
    """
    operator, matrix = operator_of(node), operator_of(node).matrix_input
    eight_bits = node.attributes.get_int("expert_weight_bits", 4) == 8
    if operator.quantizes or eight_bits or node.attributes.get_int("accuracy_level", 0) == INT8_ACCURACY:
        return True
    if matrix is None:
        return False
    weight = input_at(node, matrix)
    maker = weight.producer() if weight is not None else None
    return maker is not None and operator_of(maker).dequantizes and is_fused(maker)


def relate_axes(operation: Operation) -> None:
    """Relate the axes of one node by its operator's rule. An operator without a rule needs every axis whole.

    So does one that draws random numbers: all ranks must have the same. Rules expect a valid node; for an invalid one
    they may raise any error.
    """
    node, rule = operation.node, operator_of(operation.node).axes
    # Optional outputs without readers often have no shape, and don't matter.
    made = [
        (v, axes) for v, axes in zip(node.outputs, operation.outputs, strict=True) if v.uses() or v.is_graph_output()
    ]
    shapes = (*zip(node.inputs, operation.inputs, strict=True), *made)
    if rule is None or draws(node) or any(value is not None and value.name and axes is None for value, axes in shapes):
        operation.opaque("splitc has no rule for its axes" if rule is None else "")
        return
    rule(operation)
    operation.finish()
