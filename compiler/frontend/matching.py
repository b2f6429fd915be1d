"""Matches nodes by their operators: what makes a value, and what reads it; and weights by what else reads them."""

from __future__ import annotations

from typing import TypeGuard

import numpy as np
import onnx_ir as ir

from splitc.compiler.frontend.optional import source_of


def is_onnx(node: ir.Node | None, *operators: str) -> TypeGuard[ir.Node]:
    """Whether a node is one of these operators of ONNX's own domain."""
    return node is not None and node.op_type in operators and not node.domain


def made_by(value: ir.Value | None, *operators: str) -> ir.Node | None:
    """The node that makes a value, if it is one of these operators of ONNX's own domain."""
    node = None if value is None else value.producer()
    return node if is_onnx(node, *operators) else None


def value_before(value: ir.Value | None, *operators: str) -> ir.Value | None:
    """What the node that makes a value reads first, if it is one of these operators of ONNX's own domain."""
    node = made_by(value, *operators)
    return None if node is None else node.inputs[0]


def readers_of(value: ir.Value) -> list[ir.Node]:
    """The nodes that read a value, except those that read only its sizes."""
    return [node for node in dict.fromkeys(node for node, _ in value.uses()) if node.op_type != "Shape"]


def only_user(value: ir.Value, operator: str) -> ir.Node | None:
    """The only reader of a value, if it is this operator. It may read the value several times."""
    users = dict.fromkeys(node for node, _ in value.uses())
    node = next(iter(users), None)
    return node if len(users) == 1 and is_onnx(node, operator) and not value.is_graph_output() else None


def other_input(node: ir.Node, value: ir.Value) -> ir.Value | None:
    """The other input of a node with two; None if both are the same value."""
    one, other = node.inputs
    return other if one is value and other is not value else one if other is value and one is not value else None


def combined(value: ir.Value, operator: str) -> tuple[ir.Value, ir.Value] | None:
    """The other input of a value's only reader, and its result, if it is this operator of two inputs."""
    node = only_user(value, operator)
    other = None if node is None else other_input(node, value)
    return None if node is None or other is None else (other, node.outputs[0])


def is_own(value: ir.Value, rank: int) -> bool:
    """Whether a value is a weight with so many axes that has one reader, and that no request overrides."""
    constant = value.const_value
    return (
        value.is_initializer()
        and constant is not None
        and len(constant.shape) == rank
        and len(value.uses()) == 1
        and source_of(value) is None
    )


def own_matrix(value: ir.Value) -> tuple[ir.Value, int] | None:
    """The matrix of weights that a product reads, and the axis of it that is the result's columns.

    That is 1, or 0 if a Transpose stands between. None if anything else reads the weights.
    """
    turned = made_by(value, "Transpose")
    stored = value if turned is None else turned.inputs[0]
    if stored is None or not is_own(stored, 2) or stored.is_graph_output() or value.is_graph_output():
        return None
    if turned is None:
        return stored, 1
    swaps = list(turned.attributes.get_ints("perm", (1, 0))) == [1, 0]
    return (stored, 0) if swaps and len(value.uses()) == 1 else None


def tensor_of(weight: ir.Value) -> ir.TensorProtocol:
    """The tensor of a value that is known to be a weight."""
    assert weight.const_value is not None
    return weight.const_value


def constant_numbers(value: ir.Value | None) -> list[int] | None:
    """The numbers of a constant list, or a constant number; None if it is computed, or requests may override it."""
    if value is None or value.const_value is None or source_of(value) is not None:
        return None
    return [int(number) for number in np.ravel(value.const_value.numpy())]
