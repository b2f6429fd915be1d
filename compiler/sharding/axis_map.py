"""The axes of a whole model: every value's factors, and what each node's rule said of them."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy.typing as npt
import onnx_ir as ir

from splitc.compiler.frontend.asked_shapes import Shape
from splitc.compiler.frontend.graph import Graph
from splitc.compiler.frontend.optional import source_of
from splitc.compiler.frontend.shapes import BoundShapes, shape_of
from splitc.compiler.operators import axes as ax
from splitc.compiler.operators.axes import Axis, Pin
from splitc.compiler.operators.operation import Axes, Operation
from splitc.compiler.operators.registry import relate_axes


@dataclass(frozen=True)
class AxisMap:
    """For each node its operation, in the model's order, and for each value that it makes or that is an input its axes.

    What a node reads has its axes in `operations[node].inputs`: small weights have others at each use. `bound` are the
    shapes with which they were found.
    """

    operations: Mapping[ir.Node, Operation]
    axes: Mapping[ir.Value, Axes]
    bound: BoundShapes

    def weight_uses(self) -> Iterator[tuple[ir.Value, Axes]]:
        """Each weight with its axes, once a use."""
        for node, operation in self.operations.items():
            for value, axes in zip(node.inputs, operation.inputs, strict=True):
                if value is not None and value.is_initializer():
                    yield value, axes


def find_axes(graph: Graph, bound: BoundShapes) -> AxisMap:
    """Relate all axes of the model, node by node. `bound` should have unlike sizes for what is not alike."""
    inputs = {value: _fresh(bound.shapes.get(value.name or "")) for value in graph.graph.inputs}
    return _relate(graph, bound, graph.nodes, inputs, frozenset())


def find_axes_apart(graph: Graph, bound: BoundShapes, nodes: Collection[ir.Node]) -> AxisMap:
    """Relate the axes of these nodes, each by itself: they have only weights, and what is made of those, in common."""
    return _relate(graph, bound, _with_constant(graph, nodes, graph.constant), {}, frozenset(nodes))


def _relate(
    graph: Graph, bound: BoundShapes, nodes: Iterable[ir.Node], shared: dict[ir.Value, Axes], apart: Collection[ir.Node]
) -> AxisMap:
    """The axes of the nodes, in order; `shared` are those of the values that are there before them.

    Any other value that they read, what the nodes `apart` make included, has axes of its own at each use.
    """
    operations: dict[ir.Node, Operation] = {}

    def axes_of(value: ir.Value | None) -> Axes:
        if value is None:
            return None
        if not value.is_initializer():
            return shared[value] if value in shared else _fresh(bound.shapes.get(value.name or ""))
        shape = shape_of(value)
        if (source := source_of(value)) is not None and not source.is_fixed:
            return tuple(_whole(size, f"the optional input '{value.name}' may have another shape") for size in shape)
        if sum(size != 1 for size in shape) < 2:
            # Exporters merge equal vectors: biases of zeros, norms of ones. Each use may be cut in another way.
            return _fresh(shape)
        return shared.setdefault(value, _fresh(shape))

    for node in nodes:
        made = [_fresh(bound.shapes.get(value.name or "")) for value in node.outputs]
        if node not in apart:
            shared.update(zip(node.outputs, made, strict=True))
        constants = [_constant(value, bound) for value in node.inputs]
        weights = [n for n, value in enumerate(node.inputs) if value is not None and graph.is_constant(value)]
        operation = Operation(node, [axes_of(value) for value in node.inputs], made, constants, weights)
        relate_axes(operation)
        for value in graph.reads[node]:
            if value not in node.inputs:  # a subgraph reads it
                for axis in axes_of(value) or ():
                    ax.pin(axis, Pin(node, "it is read inside control flow"))
        operations[node] = operation
    return AxisMap(operations, shared, bound)


def _with_constant(graph: Graph, nodes: Collection[ir.Node], constant: Collection[ir.Node]) -> list[ir.Node]:
    """The nodes, and the constant ones above them, in the model's order."""
    found: set[ir.Node] = set()
    stack = list(nodes)
    while stack:
        node = stack.pop()
        if node not in found:
            found.add(node)
            above = (value.producer() for value in graph.reads[node])
            stack += [producer for producer in above if producer is not None and producer in constant]
    return [node for node in graph.nodes if node in found]


def _fresh(shape: Shape | None) -> Axes:
    return None if shape is None else tuple(map(ax.new_axis, shape))


def _whole(size: int, reason: str) -> Axis:
    """A new axis of this size that nobody may cut."""
    axis = ax.new_axis(size)
    ax.pin(axis, Pin(None, reason))
    return axis


def _constant(value: ir.Value | None, bound: BoundShapes) -> npt.NDArray[Any] | None:
    """What a value is known to be with the bound shapes, if it is a few whole numbers."""
    if value is None or source_of(value) is not None:
        return None
    tensor = value.const_value
    if tensor is not None and tensor.size <= PLACES and tensor.dtype.is_integer():
        return tensor.numpy()
    return bound.constants.get(value.name or "")


# What says axes, sizes or bounds is no longer than this.
PLACES = 64
