"""Compute shape arithmetic: the small integer values that follow from constants and from shapes that are known."""

from __future__ import annotations

import math
from typing import Any, Optional

import numpy as np
import numpy.typing as npt
import onnx_ir as ir
from onnx.reference import ReferenceEvaluator

Array = npt.NDArray[Any]

# Shape vectors are short; what is longer is data.
LONGEST = 1024
# The operators that exporters do shape arithmetic with.
OPERATORS = frozenset(
    """
    Add And Cast Ceil Concat ConstantOfShape Div Equal Expand Flatten Floor Gather Greater GreaterOrEqual Identity Less
    LessOrEqual Max Min Mod Mul Neg Not Or Range ReduceMax ReduceMin ReduceProd ReduceSum Reshape Shape Size Slice Split
    Sqrt Squeeze Sub Tile Transpose Unsqueeze Where
    """.split()  # noqa: SIM905  # as a list it would take a page
)

# Those that make more of few numbers.
EXPANDING = frozenset({"ConstantOfShape", "Expand", "Range", "Tile"})


def fold_shapes(graph: ir.Graph) -> int:
    """Give every value that shape arithmetic makes its `const_value`, in place. Returns how many are new.

    Shape inference then knows the targets of Reshape and Expand, which it can't always follow by itself.
    """
    count = 0
    for node in graph:
        if node.op_type not in OPERATORS or node.domain not in ("", "ai.onnx"):
            continue
        if all(value.const_value is not None for value in node.outputs) or not all(map(_is_short, node.outputs)):
            continue
        if (results := _evaluate(node)) is not None:
            for value, array in zip(node.outputs, results):
                value.const_value = ir.tensor(array, name=value.name)
            count += 1
    return count


def _is_short(value: ir.Value) -> bool:
    """Not known to be more than a shape vector."""
    return value.shape is None or not value.shape.is_static() or math.prod(value.shape.numpy()) <= LONGEST


def _evaluate(node: ir.Node) -> Optional[list[Array]]:
    """What a node computes, by ONNX's reference implementation; None where that is not known, or is data."""
    if node.op_type in ("Shape", "Size"):
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
        results = evaluator.run(None, {value.name or "": array for value, array in zip(inputs, arrays)})
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

    For analysis only: what the other branch would do with these shapes may not even be valid.
    """
    count = 0
    for node in [node for node in graph if node.op_type == "If"]:
        condition = node.inputs[0].const_value if node.inputs[0] is not None else None
        if condition is None:
            continue
        branch = node.attributes["then_branch" if condition.numpy().item() else "else_branch"].as_graph()
        outputs = list(branch.outputs)
        for value in branch.initializers.values():
            graph.register_initializer(value)
        inner = list(branch)
        branch.outputs.clear()
        branch.remove(inner)
        graph.insert_before(node, inner)
        for old, new in zip(node.outputs, outputs):
            new.name, old.name = old.name, None
            old.replace_all_uses_with(new, replace_graph_outputs=True)
        graph.remove(node)
        count += 1
    return count
