"""Uniform weights: all their rows, or slices along another axis, are equal, as in biases of zeros.

Exporters merge uniform weights of one shape, whatever they are for, and what is computed from them alone. So each
reader may need another shard of them.
"""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from splitc.compiler.graphs.editor import Editor
from splitc.compiler.graphs.lazy_tensors import read_alone
from splitc.compiler.graphs.matching import is_onnx
from splitc.compiler.operators.registry import operator_of
from splitc.compiler.remembered import remembered
from splitc.runtime.arrays.array import Array

# Larger weights are not read, and count as not uniform. A choice: today's exporters merge weights of up to a thousand
# elements, and the zero points of a 4-bit matrix are of this size.
MOST_BYTES = 1 << 20


@remembered
def is_uniform(weight: ir.Value) -> bool:
    """Whether a weight has several axes and at least one element, and along one of these axes all slices are equal."""
    tensor = weight.const_value
    if tensor is None or not 0 < tensor.nbytes <= MOST_BYTES or tensor.dtype == ir.DataType.STRING:
        return False
    if sum(size > 1 for size in tensor.shape.numpy()) < 2:
        return False
    elements = np.asarray(read_alone(tensor))
    return any(_repeats(elements, axis) for axis, size in enumerate(elements.shape) if size > 1)


def _repeats(elements: Array, axis: int) -> bool:
    """Whether all slices along an axis are equal. Two are compared first, since most weights' differ."""
    first, second = elements.take([0], axis), elements.take([1], axis)
    return bool((first == second).all()) and bool((elements == first).all())


def copy_selections(graph: ir.Graph) -> None:
    """Give each reader of uniform numbers its own copy of the node that makes them, in place.

    These are parts of uniform weights, one number repeated to some sizes, and dequantized biases, which are uniform
    where exporters merged them. Copies that are sharded alike are merged again by ONNX Runtime.
    """
    selections: dict[ir.Value, ir.Node] = {}
    for node in (node for node in graph if len(node.outputs) == 1):
        source = node.inputs[0] if node.inputs else None
        is_weight = source is not None and source.is_initializer()
        is_part = source is not None and _selects(node) and (source in selections or (is_weight and is_uniform(source)))
        if is_part or _repeats_one(node, source) or _dequantizes_bias(node, source):
            selections[node.outputs[0]] = node
    editor = Editor(graph)
    for value, node in reversed(selections.items()):
        for reader, number in list(value.uses())[not value.is_graph_output() :]:
            reader.replace_input_with(number, _twin(node, editor))


def _selects(node: ir.Node) -> bool:
    """Whether a node's output consists only of elements of its first input."""
    operator = operator_of(node)
    return (operator.rearranges and node.op_type != "Concat") or (operator.reads_part and not operator.reads_shape)


def _repeats_one(node: ir.Node, source: ir.Value | None) -> bool:
    """Whether a node repeats one number to sizes that it reads."""
    if is_onnx(node, "Expand"):
        weight = None if source is None or not source.is_initializer() else source.const_value
        return weight is not None and weight.size == 1
    return is_onnx(node, "ConstantOfShape")


def _dequantizes_bias(node: ir.Node, source: ir.Value | None) -> bool:
    """Whether a node dequantizes numbers along one axis: a bias, or the scales of channels."""
    if source is None or source.const_value is None or not operator_of(node).dequantizes:
        return False
    return sum(size > 1 for size in source.const_value.shape.numpy()) == 1


def _twin(node: ir.Node, editor: Editor) -> ir.Value:
    """The result of a copy of a node, inserted after it."""
    attributes = node.attributes.values()
    twin = ir.Node(
        node.domain, node.op_type, node.inputs, attributes, version=node.version, metadata_props=node.metadata_props
    )
    node.append(twin)
    (made,), (own,) = twin.outputs, node.outputs
    made.type, made.shape = own.type, own.shape
    editor.name(made, own.name)
    twin.name = f"{node.name}/{made.name}"
    return made
