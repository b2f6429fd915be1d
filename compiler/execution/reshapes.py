"""Sizes of Reshapes that ONNX Runtime replaces by constants: those of axes that stay in place."""

from __future__ import annotations

from collections import Counter

import onnx_ir as ir

from splitc.compiler.execution.liveness import Nodes
from splitc.compiler.frontend.matching import made_by, value_before


def without_own_sizes(nodes: Nodes) -> Nodes:
    """The nodes without those that only tell a Reshape the sizes of its own input.

    Such a size is concatenated with numbers, at the place it has in the input. So ONNX Runtime writes a 0 for it, which
    means the same (ReshapeFusion, core/optimizer/reshape_fusion.cc).
    """
    given = {node: node.inputs[1] for node in nodes.order if node.op_type == "Reshape" and _has_own_sizes(node)}

    def read(node: ir.Node) -> list[ir.Value]:
        return [value for value in nodes.reads(node) if value is not given.get(node)]

    readers = Counter(value for node in nodes.order for value in read(node))
    gone = set[ir.Node]()
    for node in reversed(nodes.order):
        sizes = any(value.dtype == ir.DataType.INT64 for value in node.outputs)
        if sizes and not any(readers[value] or value in nodes.kept for value in node.outputs):
            readers.subtract(read(node))
            gone.add(node)
    return nodes.without(gone, read)


def _has_own_sizes(reshape: ir.Node) -> bool:
    data, target = reshape.inputs[:2]
    joined = made_by(target, "Concat")
    if data is None or joined is None or len(joined.outputs[0].uses()) > 1:
        return False
    place = 0
    for value in joined.inputs:
        if value is not None and value.const_value is not None:
            place += value.const_value.size
        elif value is None or not _is_size(value, data, place):
            return False
        else:
            place += 1
    return True


def _is_size(value: ir.Value, data: ir.Value, axis: int) -> bool:
    """Whether a value is the size of an axis of `data`, by Shape, Gather and Unsqueeze."""
    node = made_by(value_before(value, "Unsqueeze") or value, "Gather")
    if node is None or node.inputs[1] is None:
        return False
    shape, index = made_by(node.inputs[0], "Shape"), node.inputs[1].const_value
    is_shape = shape is not None and not shape.attributes and shape.inputs[0] is data
    return is_shape and index is not None and index.size == 1 and int(index.numpy().reshape(())) == axis
