"""Helpers to match patterns: the producer and the readers of a value, and weights that nothing else reads."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeGuard

import numpy as np
import onnx_ir as ir

from splitc.compiler.nodes import known_tensor, known_weight
from splitc.runtime.arrays.array import Array

# Operators that change a value's shape and keep the order of its elements.
VIEWS = frozenset({"Reshape", "Squeeze", "Unsqueeze", "Flatten"})


def is_onnx(node: ir.Node | None, *operators: str) -> TypeGuard[ir.Node]:
    """Whether a node is one of these standard ONNX operators."""
    return node is not None and node.op_type in operators and not node.domain


def made_by(value: ir.Value | None, *operators: str) -> ir.Node | None:
    """The producer of a value, if it is one of these standard ONNX operators."""
    node = None if value is None else value.producer()
    return node if is_onnx(node, *operators) else None


def value_before(value: ir.Value | None, *operators: str) -> ir.Value | None:
    """The first input of a value's producer, if that is one of these standard ONNX operators."""
    node = made_by(value, *operators)
    return None if node is None else node.inputs[0]


def source_through(value: ir.Value, *operators: str) -> ir.Value:
    """The value before any number of these operators, each of which is followed through its first input."""
    while (source := value_before(value, *operators)) is not None:
        value = source
    return value


def readers_of(value: ir.Value) -> list[ir.Node]:
    """The nodes that read a value, except Shape nodes."""
    return [node for node in dict.fromkeys(node for node, _ in value.uses()) if node.op_type != "Shape"]


def only_user(value: ir.Value, operator: str) -> ir.Node | None:
    """The only reader of a value, if it is this operator. It may read the value several times."""
    users = dict.fromkeys(node for node, _ in value.uses())
    node = next(iter(users), None)
    return node if len(users) == 1 and is_onnx(node, operator) and not value.is_graph_output() else None


def input_orders(node: ir.Node) -> Sequence[Sequence[ir.Value | None]]:
    """A node's inputs as they are, and reversed if their order does not matter."""
    return (node.inputs, node.inputs[::-1]) if node.op_type in ("Add", "Mul", "Max", "Min") else (node.inputs,)


def other_input(node: ir.Node, value: ir.Value) -> ir.Value | None:
    """The other one of a node's two inputs; None if both are the same value."""
    one, other = node.inputs
    return other if one is value and other is not value else one if other is value and one is not value else None


def combined(value: ir.Value, operator: str) -> tuple[ir.Value, ir.Value] | None:
    """The other input and the result of a value's only reader, if that is this operator of two inputs; else None."""
    node = only_user(value, operator)
    other = None if node is None else other_input(node, value)
    return None if node is None or other is None else (other, node.outputs[0])


def filled_with(node: ir.Node) -> Array:
    """The number that a ConstantOfShape repeats, as an array without axes. By default it is 0 in float32."""
    number = node.attributes.get("value")
    return np.zeros((), np.float32) if number is None else number.as_tensor().numpy().reshape(())


def is_own(value: ir.Value, rank: int) -> bool:
    """Whether a value is a weight of this rank with one reader, which requests can't override."""
    tensor = known_weight(value)
    return tensor is not None and len(tensor.shape) == rank and len(value.uses()) == 1


def own_matrix(value: ir.Value) -> tuple[ir.Value, int] | None:
    """The weight matrix that a product reads, and its axis of columns: 1, or 0 if a Transpose is between.

    None for other values, and if the weight has other readers.
    """
    transpose = made_by(value, "Transpose")
    stored = value if transpose is None else transpose.inputs[0]
    if stored is None or not is_own(stored, 2) or stored.is_graph_output() or value.is_graph_output():
        return None
    if transpose is None:
        return stored, 1
    swaps = list(transpose.attributes.get_ints("perm", (1, 0))) == [1, 0]
    return (stored, 0) if swaps and len(value.uses()) == 1 else None


def tensor_of(weight: ir.Value) -> ir.TensorProtocol:
    """The tensor of a weight."""
    assert weight.const_value is not None
    return weight.const_value


def constant(value: ir.Value | None) -> float | None:
    """The number of a constant of one element; None for any other value, and for one that requests may override."""
    tensor = known_tensor(value)
    return float(tensor.numpy().reshape(())) if tensor is not None and tensor.size == 1 else None


def root_of_square(value: ir.Value | None) -> ir.Value | None:
    """The x of x^2; None for any other value."""
    node = made_by(value, "Mul", "Pow")
    if node is None:
        return None
    is_square = node.inputs[0] is node.inputs[1] if node.op_type == "Mul" else constant(node.inputs[1]) == 2
    return node.inputs[0] if is_square else None


def constant_numbers(value: ir.Value | None) -> list[int] | None:
    """The elements of an integer constant; None if the value is computed, or requests may override it."""
    tensor = known_tensor(value)
    return None if tensor is None else [int(number) for number in np.ravel(tensor.numpy())]


def list_of(node: ir.Node, name: str) -> list[int] | None:
    """A node's list of numbers, such as axes: an attribute or, in later opsets, the second input. None if not known."""
    numbers = node.attributes.get_ints(name, None)
    if numbers is not None:
        return list(numbers)
    return constant_numbers(node.inputs[1]) if len(node.inputs) > 1 else None
