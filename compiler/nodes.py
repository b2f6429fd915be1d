"""Names of nodes, operators and values, and the numbers of constants."""

from __future__ import annotations

from collections.abc import Container
from typing import Any

import onnx_ir as ir

# The domain of ONNX Runtime's own operators.
MICROSOFT = "com.microsoft"
# Marks initializers that are also inputs of the model: requests may override them (graphs/optional.py).
OPTIONAL = "splitc.optional"


def inputs_of(node: ir.Node) -> list[ir.Value]:
    """A node's inputs, without those that are left out."""
    return [value for value in node.inputs if value is not None]


def operator_name(node: ir.Node) -> str:
    """An operator's name, with its domain if that is not ONNX's own: `MatMul`, `com.microsoft.Gelu`."""
    return node.op_type if node.domain in ("", "ai.onnx") else f"{node.domain}.{node.op_type}"


def name_of(node: ir.Node) -> str:
    """A node's name; without one, that of its output."""
    return node.name or node.outputs[0].name or ""


def describe_node(node: ir.Node) -> str:
    """A node for messages: its name and operator; without a name, its operator and its output."""
    if not node.name:
        return f"the {node.op_type} node that makes '{node.outputs[0].name}'"
    return f"node '{node.name}' ({node.op_type})"


def input_at(node: ir.Node, place: int) -> ir.Value | None:
    """An input of a node by its place; None if it is left out."""
    return node.inputs[place] if place < len(node.inputs) else None


def known_tensor(value: ir.Value | None) -> ir.TensorProtocol | None:
    """The tensor of a constant; None if the value is computed, or requests may override it."""
    return None if value is None or OPTIONAL in value.meta else value.const_value


def known_weight(value: ir.Value | None) -> ir.TensorProtocol | None:
    """The tensor of an initializer that requests can't override; None for other values, even if they are constant."""
    return known_tensor(value) if value is not None and value.is_initializer() else None


def settings_of(node: ir.Node) -> dict[str, Any]:
    """A node's attributes, as plain values."""
    return {name: attribute.value for name, attribute in node.attributes.items()}


def unused_name(name: str | None, used: Container[str | None]) -> str:
    """The name, with as many primes (') as needed to make it unused."""
    name = name or ""
    while name in used:
        name += "'"
    return name
