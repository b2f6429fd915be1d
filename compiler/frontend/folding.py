"""Compute shape arithmetic: the small integer values that follow from constants and from shapes that are known."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx_ir as ir
from onnx.reference import ReferenceEvaluator

from splitc.compiler.operators.registry import operator_of

Array = npt.NDArray[Any]

# Shape vectors are short; what is longer is data.
LONGEST = 1024


def fold_shapes(graph: ir.Graph) -> int:
    """Give every value that shape arithmetic makes its `const_value`, in place. Returns how many are new.

    Shape inference then knows the targets of Reshape and Expand, which it can't always follow by itself.
    """
    return sum(map(_fold, graph))


def fold_from(graph: ir.Graph, known: set[ir.Value]) -> int:
    """As `fold_shapes`, of what follows from the values `known`, to which it is added; what it is made of is given."""
    count = 0
    for node in graph:
        if any(value in known for value in node.inputs) and _fold(node):
            known.update(node.outputs)
            count += 1
    return count


def _fold(node: ir.Node) -> bool:
    """Give a node's outputs their `const_value`, if it is one of shape arithmetic and all that it reads is known."""
    if not operator_of(node).folds:
        return False
    if all(value.const_value is not None for value in node.outputs) or not all(map(_is_short, node.outputs)):
        return False
    results = _evaluate(node)
    for value, array in zip(node.outputs, results or (), strict=False):
        value.const_value = ir.tensor(array, name=value.name)
    return results is not None


def _is_short(value: ir.Value) -> bool:
    """Not known to be more than a shape vector."""
    return value.shape is None or not value.shape.is_static() or math.prod(value.shape.numpy()) <= LONGEST


def _evaluate(node: ir.Node) -> list[Array] | None:
    """What a node computes, by ONNX's reference implementation; None where that is not known, or is data."""
    if operator_of(node).reads_shape:
        source = node.inputs[0]
        if source is None or source.shape is None or not source.shape.is_static():
            return None
        shape = np.array(source.shape.numpy(), np.int64)
        if node.op_type == "Size":
            return [np.array(math.prod(shape), np.int64)]
        return [shape[node.attributes.get_int("start", 0) : node.attributes.get_int("end", None)]]
    inputs = [value for value in node.inputs if value is not None]
    tensors = [value.const_value for value in inputs]
    arrays = [tensor.numpy() for tensor in tensors if tensor is not None and tensor.size <= LONGEST]
    if len(arrays) < len(inputs) or not _gives_short(node, arrays):
        return None
    opset = node.graph.opset_imports.get("", 17) if node.graph is not None else 17
    evaluator = ReferenceEvaluator(ir.serde.serialize_node(node), opsets={"": opset})
    try:
        results = evaluator.run(None, {value.name or "": array for value, array in zip(inputs, arrays, strict=True)})
    except (IndexError, RuntimeError, TypeError, ValueError):
        # Invalid with these shapes, as in a branch that is not taken: then it is not known, and nothing is lost.
        return None
    return [np.asarray(array) for array in results]


def _gives_short(node: ir.Node, arrays: list[Array]) -> bool:
    """Whether an operator whose result may be of any size gives a short one."""
    if node.op_type == "Range":
        start, limit, delta = (float(array.item()) for array in arrays)
        return abs(limit - start) <= LONGEST * abs(delta)
    if node.op_type == "Tile":
        return int(arrays[0].size * np.prod(arrays[1])) <= LONGEST
    if node.op_type in ("ConstantOfShape", "Expand"):
        size = arrays[0].size if node.op_type == "Expand" else 1
        return int(np.prod(np.maximum(arrays[-1], 1))) * size <= LONGEST
    return True


def take_branches(graph: ir.Graph) -> int:
    """Put the branch that will be taken in the place of each If whose condition is known. Returns how many.

    Where the condition follows from sizes, what the other branch would do with these may not even be valid.
    """
    count = 0
    for node in [node for node in graph if node.op_type == "If"]:
        condition = known_array(node.inputs[0])
        if condition is None:
            continue
        branch = node.attributes["then_branch" if condition.item() else "else_branch"].as_graph()
        outputs = list(branch.outputs)
        for value in branch.initializers.values():
            graph.register_initializer(value)
        inner = list(branch)
        branch.outputs.clear()
        branch.remove(inner)
        graph.insert_before(node, inner)
        own = {value for each in inner for value in each.outputs}
        for old, new in zip(node.outputs, outputs, strict=True):
            stand_in(node, old, new, new in own)
            own.discard(new)  # it has that output's name now
        _let_go(node)
        graph.remove(node, safe=True)
        count += 1
    return count


def _let_go(node: ir.Node) -> None:
    """What the nodes inside a node read is not read by them any more."""
    for attribute in node.attributes.values():
        if attribute.type == ir.AttributeType.GRAPH:
            for inner in ir.traversal.RecursiveGraphIterator(attribute.as_graph()):
                for number in range(len(inner.inputs)):
                    inner.replace_input_with(number, None)


def known_array(value: ir.Value | None) -> Array | None:
    """What a value is known to be, if it is."""
    tensor = value.const_value if value is not None else None
    return None if tensor is None else tensor.numpy()


def stand_in(node: ir.Node, old: ir.Value, new: ir.Value, rename: bool = False) -> None:
    """Let a value stand for a node's output: under the output's name, or behind an Identity that has it."""
    if not rename:
        identity = ir.node("Identity", [new])
        assert node.graph is not None
        node.graph.insert_before(node, identity)
        identity.outputs[0].type, identity.outputs[0].shape = new.type, new.shape
        new = identity.outputs[0]
    new.name, old.name = old.name, None
    old.replace_all_uses_with(new, replace_graph_outputs=True)
