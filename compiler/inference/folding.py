"""Computes shape arithmetic: small integer values that depend only on constants and known shapes.

onnxscript's folding replaces nodes, also those that compute from weights. Here values get a `const_value`, and the
graph stays as it is.
"""

from __future__ import annotations

import math
from collections.abc import Hashable
from functools import lru_cache

import numpy as np
import onnx_ir as ir

from splitc.compiler.graphs.alone import node_alone, run_alone
from splitc.compiler.graphs.node_key import node_key, tensor_key
from splitc.compiler.graphs.reads import read_sizes
from splitc.compiler.graphs.unused import disconnect_subgraphs
from splitc.compiler.nodes import inputs_of
from splitc.compiler.operators.registry import operator_of
from splitc.runtime.arrays.array import Array
from splitc.runtime.engines.onnxruntime_cpu import ERRORS

# The most elements of a shape vector. Anything longer is data. With 64, or without a limit, the plans of 43 models are
# the same; without one, tables would be folded too.
LONGEST = 1024
# The most cached results, which are shared by nodes that compute the same, also in other models. A choice: a result is
# a short array, and dropped ones are recomputed.
MOST_RESULTS = 4096


def fold_shapes(graph: ir.Graph) -> int:
    """Set the `const_value` of the outputs of shape arithmetic, in place. Returns the number of folded nodes.

    Shape inference alone can't always tell the sizes that Reshape and Expand get.
    """
    return sum(map(fold, graph))


def fold_from(graph: ir.Graph, known: set[ir.Value]) -> int:
    """As `fold_shapes`, but only for nodes that depend on a value in `known`. Folded values are added to `known`."""
    count = 0
    for node in graph:
        if any(value in known for value in node.inputs) and fold(node):
            known.update(node.outputs)
            count += 1
    return count


def fold(node: ir.Node) -> bool:
    """Set the `const_value` of a node's outputs, with shape and type. Returns whether that was possible.

    It is for shape arithmetic whose inputs, or whose inputs' shapes, are known.
    """
    if not operator_of(node).shape_arithmetic:
        return False
    if all(value.const_value is not None for value in node.outputs) or not all(map(_is_short, node.outputs)):
        return False
    results = _evaluate(node)
    if results is None or any(array.size > LONGEST for array in results):
        return False
    for value, array in zip(node.outputs, results, strict=False):
        if array.dtype == np.float32 and _is_bfloat16(node, value):  # which CPUs compute in float32
            array = array.astype(ir.DataType.BFLOAT16.numpy())
        value.const_value = tensor = ir.Tensor(array, name=value.name)  # ir.tensor takes seven times as long
        value.shape, value.type = ir.Shape(array.shape), ir.TensorType(tensor.dtype)
    return True


def _is_bfloat16(node: ir.Node, value: ir.Value) -> bool:
    """Whether a float that a node makes is bfloat16, also if its type was not inferred yet."""
    if value.dtype not in (None, ir.DataType.UNDEFINED):
        return value.dtype == ir.DataType.BFLOAT16
    if (asked := node.attributes.get("to", node.attributes.get("dtype"))) is not None:
        return asked.as_int() == ir.DataType.BFLOAT16
    return any(read is not None and read.dtype == ir.DataType.BFLOAT16 for read in node.inputs)


def _is_short(value: ir.Value) -> bool:
    """Whether a value may be a shape vector: its size is at most LONGEST, or unknown."""
    return value.shape is None or not value.shape.is_static() or math.prod(value.shape.numpy()) <= LONGEST


def _evaluate(node: ir.Node) -> list[Array] | None:
    """A node's results; None if an input is unknown or longer than LONGEST."""
    if operator_of(node).reads_shape:
        source = node.inputs[0]
        if source is None or source.shape is None or not source.shape.is_static():
            return None
        return [read_sizes(node, source.shape.numpy())]
    inputs = inputs_of(node)
    tensors = [tensor for value in inputs if (tensor := value.const_value) is not None]
    arrays = [tensor.numpy() for tensor in tensors if tensor.size <= LONGEST and tensor.dtype != ir.DataType.STRING]
    if len(arrays) < len(inputs) or not _gives_short(node, arrays):
        return None
    if (content := _content(node)) is None:
        return _run(node)
    if not (results := _results(content)):
        results.append(_run(node))
    return results[0]


@lru_cache(maxsize=MOST_RESULTS)
def _results(content: Hashable) -> list[list[Array] | None]:
    """The cached results of nodes with this content: an empty list at first, to be appended to."""
    return []


def _content(node: ir.Node) -> Hashable:
    """A key that is equal for nodes that compute the same; None for a node that can't be compared."""
    if (key := node_key(node)) is None:
        return None
    return (
        key,
        node.graph.opset_imports.get(node.domain) if node.graph is not None else None,
        tuple([None if value is None else tensor_key(value.const_value) for value in node.inputs]),
        tuple([bool(value.name) for value in node.outputs]),
    )


def _run(node: ir.Node) -> list[Array] | None:
    """The results of a node with known inputs in ONNX Runtime; None if it fails."""
    try:
        return run_alone(node_alone(node, lambda _: True), {})
    except ERRORS:
        # The node is invalid with these shapes, as in a branch that is not taken.
        return None


def _gives_short(node: ir.Node, arrays: list[Array]) -> bool:
    """Whether a node's result has at most LONGEST elements, for operators whose result may have any size."""
    if node.op_type == "Range":
        start, limit, delta = (float(array.item()) for array in arrays)
        return abs(limit - start) <= LONGEST * abs(delta)
    if node.op_type == "Tile":
        return int(arrays[0].size * np.prod(arrays[1])) <= LONGEST
    if node.op_type == "OneHot":
        return int(arrays[0].size * arrays[1].item()) <= LONGEST
    if node.op_type in ("ConstantOfShape", "Expand"):
        size = arrays[0].size if node.op_type == "Expand" else 1
        return int(np.prod(np.maximum(arrays[-1], 1))) * size <= LONGEST
    return True


def take_branches(graph: ir.Graph) -> int:
    """Replace each If with a known condition by the branch that is taken, in place. Returns the number of these.

    With these sizes the other branch may be invalid.
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
        node.prepend(inner)
        own = {value for node_inside in inner for value in node_inside.outputs}
        for old, new in zip(node.outputs, outputs, strict=True):
            new.shape = _named_sizes(new.shape, old.shape)
            stand_in(node, old, new, new in own)
            own.discard(new)  # it is renamed only once
        disconnect_subgraphs(node)
        graph.remove(node, safe=True)
        count += 1
    return count


def _named_sizes(inner: ir.Shape | None, outer: ir.Shape | None) -> ir.Shape | None:
    """The shape of a branch's output, with the symbols of the If's output where both have symbols."""
    if inner is None or outer is None or len(inner) != len(outer):
        return inner
    return ir.Shape([_named(*sizes) for sizes in zip(inner, outer, strict=True)])


def _named(inner: int | ir.SymbolicDim, outer: int | ir.SymbolicDim) -> int | ir.SymbolicDim:
    if isinstance(inner, int) or isinstance(outer, int):
        return inner
    return inner if outer.value is None else outer


def known_array(value: ir.Value | None) -> Array | None:
    """The value's elements if it is constant or folded, else None."""
    tensor = value.const_value if value is not None else None
    return None if tensor is None else tensor.numpy()


def stand_in(node: ir.Node, old: ir.Value, new: ir.Value, rename: bool = False) -> None:
    """Replace a node's output by another value: renamed if `rename`, else through an Identity with the old name."""
    if not rename:
        identity = ir.node("Identity", [new])
        node.prepend(identity)
        identity.outputs[0].type, identity.outputs[0].shape = new.type, new.shape
        new = identity.outputs[0]
    new.name, old.name = old.name, None
    old.replace_all_uses_with(new, replace_graph_outputs=True)
