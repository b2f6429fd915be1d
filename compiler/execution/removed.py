"""Nodes that ONNX Runtime removes.

These are additions of 0 and multiplications by 1, sizes of Reshapes that become constants since their axes stay in
place, and transposes that cancel, also with elementwise nodes between them.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import onnx_ir as ir

from splitc.compiler.execution.convolutions import resolve
from splitc.compiler.execution.exchange import EngineGraph
from splitc.compiler.execution.liveness import Nodes, Size
from splitc.compiler.graphs.matching import constant, is_onnx, made_by, value_before

# The number that changes nothing, on either side where the order does not matter.
_NEUTRAL = {"Add": 0.0, "Sub": 0.0, "Mul": 1.0, "Div": 1.0}
_COMMUTATIVE = ("Add", "Mul")
# What goes element by element, and so may come before a transpose as well as behind it.
_BETWEEN = ("Add", "Sub", "Mul", "Div", "Cast", "Relu", "Sigmoid", "Tanh", "Neg", "Sqrt")
# Bytes of what may be turned with it: a number, or a few.
_SMALL = 256


def without_noops(graph: EngineGraph) -> EngineGraph:
    """The graph without no-ops (core/optimizer/noop_elimination.cc).

    Exporters write them where a model's factor is 1. Those whose result leaves the engine stay. An all-reduce after a
    no-op adds the no-op's input.
    """
    unchanged = {node: source for node in graph.nodes if (source := _unchanged(node)) is not None}
    if not unchanged:
        return graph
    nodes = Nodes(graph.nodes, graph.reads)
    computed = {value for node in graph.nodes for value in node.outputs}
    exchanged = {value for one in graph.rounds for value in (*one.takes, *(v for sent in one.sent for v in sent))}
    same = dict[ir.Value, ir.Value]()
    for node, source in unchanged.items():
        made = node.outputs[0]
        if made in graph.kept or made in exchanged:
            continue
        if made not in graph.summed or (source in computed and nodes.only_reader(source) is node):
            same[made] = source
    return replace(
        graph,
        nodes=[node for node in graph.nodes if node.outputs[0] not in same],
        reads=lambda node: [resolve(same, value) for value in graph.reads(node)],
        summed={resolve(same, value): resolve(same, part) for value, part in graph.summed.items()},
        same=same,
    )


def _unchanged(node: ir.Node) -> ir.Value | None:
    """The input that a node passes on unchanged; None if it changes the values or the shape."""
    neutral = _NEUTRAL.get(node.op_type) if not node.domain else None
    if neutral is None:
        return None
    one, other = node.inputs
    if node.op_type in _COMMUTATIVE and constant(one) is not None:
        one, other = other, one
    if one is None or other is None or constant(one) is not None or constant(other) != neutral:
        return None
    axes = len(other.shape) if other.shape is not None else 0
    return one if axes <= (len(one.shape) if one.shape is not None else 0) else None


def without_own_sizes(nodes: Nodes) -> Nodes:
    """The nodes without those that only tell a Reshape the sizes of its own input.

    Such a size is concatenated with numbers, at the place it has in the input. So ONNX Runtime writes a 0 for it, which
    means the same (ReshapeFusion, core/optimizer/reshape_fusion.cc).
    """
    reshapes = [node for node in nodes.order if node.op_type == "Reshape" and _has_own_sizes(node)]
    own = {node: [value for value in nodes.reads(node) if value is not node.inputs[1]] for node in reshapes}
    nodes = nodes.without((), own)
    readers = Counter(value for node in nodes.order for value in nodes.reads(node))
    gone = set[ir.Node]()
    for node in reversed(nodes.order):
        sizes = any(value.dtype == ir.DataType.INT64 for value in node.outputs)
        if sizes and not any(readers[value] or value in nodes.kept for value in node.outputs):
            readers.subtract(nodes.reads(node))
            gone.add(node)
    return nodes.without(gone)


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


def find_turned_back(nodes: Nodes, size: Size) -> dict[ir.Value, ir.Value]:
    """The results of transposes that are removed, each with the value that replaces it.

    The values between the two have no other readers. They differ from those before only in the order of their axes
    (core/optimizer/transpose_optimization).
    """
    made = {value for node in nodes.order for value in node.outputs}
    same: dict[ir.Value, ir.Value] = {}
    for last in nodes.order:
        if last.op_type != "Transpose" or last.inputs[0] is None or last.outputs[0] in nodes.kept:
            continue
        value = last.inputs[0]
        while value in made and nodes.only_reader(value) is not None and value not in same:
            node = value.producer()
            assert node is not None
            if is_onnx(node, "Transpose"):
                if node.inputs[0] is not None and _undoes(last, node):
                    same[value], same[last.outputs[0]] = node.inputs[0], last.inputs[0]
                break
            large = [one for one in nodes.reads(node) if one in made and size(one) > _SMALL]
            if not is_onnx(node, *_BETWEEN) or len(large) != 1:
                break
            (value,) = large
    return same


def _undoes(last: ir.Node, first: ir.Node) -> bool:
    one, other = (node.attributes.get_ints("perm", ()) for node in (first, last))
    return len(one) == len(other) > 0 and [one[axis] for axis in other] == list(range(len(one)))
