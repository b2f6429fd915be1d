"""The axes of a whole model: the factors of each value's axes, related by each node's axes rule."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType

import onnx_ir as ir

from splitc.compiler.analysis.facts import Analysis
from splitc.compiler.errors import ModelError
from splitc.compiler.graphs.matching import constant_numbers, made_by
from splitc.compiler.graphs.optional import OptionalOrigin, source_of
from splitc.compiler.graphs.uniform import is_uniform
from splitc.compiler.graphs.walks import ancestors
from splitc.compiler.inference.observation import MOST_SIZES, refusal
from splitc.compiler.inference.shapes import BoundShapes, shape_of
from splitc.compiler.nodes import describe_node
from splitc.compiler.normal_form.graph import Graph
from splitc.compiler.operators import axes as ax
from splitc.compiler.operators.axes import Axis, Factor, Pin
from splitc.compiler.operators.operation import Axes, Operation
from splitc.compiler.operators.registry import relate_axes
from splitc.compiler.remembered import remembered
from splitc.compiler.request.shapes import Shape
from splitc.compiler.sizes.probes import Probes
from splitc.runtime.arrays.array import Array
from splitc.runtime.package.states import State

# The reason for pinning a state's axes.
UNLIKE_STATES = Pin(None, "it is of a state whose new value has other axes, or none that are known")


@dataclass(frozen=True)
class Island:
    """A node with axes of its own: its inputs and its output are sharded differently inside and outside of it.

    - `inputs`: the axes of inputs that are its own, as pairs of the input's index and the axis.
    - `outputs`: the axes of its only output that are its own.
    """

    node: ir.Node
    inputs: tuple[tuple[int, int], ...]
    outputs: tuple[int, ...]


@dataclass(frozen=True)
class AxisMap:
    """Each node's operation, in the model's order, and the axes of each model input and computed value.

    - `operations[node].inputs`: the axes of the values that a node reads. They may differ from `axes`: small weights
      have new axes at each use, and islands have axes of their own.
    - `bound`: the shapes with which the axes were related.
    """

    operations: Mapping[ir.Node, Operation]
    axes: Mapping[ir.Value, Axes]
    bound: BoundShapes
    islands: tuple[Island, ...] = ()

    def weight_uses(self) -> Iterator[tuple[ir.Value, Axes]]:
        """Each weight with its axes, once for each use."""
        for operation in self.operations.values():
            yield from ((value, axes) for value, axes in operation.reads() if value.is_initializer())

    def weight_atoms(self) -> set[Factor]:
        """The atoms of weights."""
        return {atom for _, axes in self.weight_uses() for atom in ax.atoms_of(axes)}


def find_axes(
    graph: Graph,
    bound: BoundShapes,
    opaque: Mapping[ir.Node, str] = MappingProxyType({}),
    islands: tuple[Island, ...] = (),
    rules: Mapping[ir.Node, Callable[[Operation], None]] = MappingProxyType({}),
    states: Collection[State] = (),
) -> AxisMap:
    """Relate all axes of the model, node by node. `bound` should have distinct sizes for unrelated axes.

    - `opaque`: nodes whose axes are pinned without their rule, each with the reason.
    - `islands`: nodes with axes of their own.
    - `states`: a rank keeps its shard of each from request to request.
    - `rules`: axes rules for single nodes, in place of their operators'.
    """
    relater = _Relater(graph, bound, {value: _computed(value, bound) for value in graph.graph.inputs}, rules)
    island_of = {island.node: island for island in islands}
    operations = {node: relater.relate(node, opaque.get(node), island_of.get(node)) for node in graph.nodes}
    ends = {value.name: value for value in (*graph.graph.inputs, *graph.graph.outputs)}
    for state in states:
        relater.relate_state(ends[state.input], ends[state.output])
    return _settled(AxisMap(operations, relater.shared, bound, islands))


@remembered
def probes_of(analysis: Analysis) -> Probes:
    """Other sizes for an analyzed model."""
    return Probes(analysis.graph, analysis.shapes, analysis.costs.certain)


@remembered
def probe_sizes(analysis: Analysis) -> BoundShapes:
    """The shapes for probe sizes, with which axes are related."""
    return probes_of(analysis).distinct()


@remembered
def small_sizes(analysis: Analysis) -> list[BoundShapes]:
    """Shapes of few elements, with which the model, or a part of it, can be run."""
    return probes_of(analysis).small()


def find_axes_separately(
    graph: Graph, bound: BoundShapes, nodes: Collection[ir.Node], opaque: Mapping[ir.Node, str] = MappingProxyType({})
) -> AxisMap:
    """Relate the axes of each of these nodes by itself: of values, they share only weights and folded weights.

    The axes of `opaque` nodes are pinned, each with the reason.
    """
    relater, separate = _Relater(graph, bound), frozenset(nodes)
    operations = {
        node: relater.relate(node, opaque.get(node), shares=node not in separate)
        for node in _with_constant(graph, nodes)
    }
    return _settled(AxisMap(operations, relater.shared, bound))


@dataclass
class _Relater:
    """Relates axes node by node. `shared` has the axes of values that are the same for all readers.

    At first these are the graph's inputs. A value that is not in `shared` gets new axes at each use. For `rules` see
    `find_axes`.
    """

    graph: Graph
    bound: BoundShapes
    shared: dict[ir.Value, Axes] = field(default_factory=dict)
    rules: Mapping[ir.Node, Callable[[Operation], None]] = field(default_factory=dict)

    def relate(
        self, node: ir.Node, opaque: str | None = None, island: Island | None = None, shares: bool = True
    ) -> Operation:
        """A node's operation: its axes are related by its rule, or pinned for the reason `opaque`.

        With `island`, it has axes of its own. With `shares`, the axes of its outputs are added to `shared`.
        """
        outputs = [_computed(value, self.bound) for value in node.outputs]
        if shares:
            self.shared.update(zip(node.outputs, outputs, strict=True))
        inputs = [self._read(value) for value in node.inputs]
        if island is not None:
            inputs, outputs = _own_axes(island, inputs, outputs)
        constants = [_constant(value, self.bound) for value in node.inputs]
        weights = [n for n, value in enumerate(node.inputs) if value is not None and self.graph.is_constant(value)]
        mixed = {n: _entries(value, self.bound) for n, value in enumerate(node.inputs) if value is not None}
        operation = Operation(node, inputs, outputs, constants, weights, mixed)
        if opaque is None and node in self.rules:
            self.rules[node](operation)
            operation.finish()
        elif opaque is None:
            relate_node(operation)
        else:
            operation.opaque(opaque)
        if node in self.graph.folded and operation.contracted:
            reason = "it is folded when an engine is loaded, and an all-reduce would run in each request"
            operation.whole([operation.contracted], reason)
        for value in self.graph.reads[node]:
            if value not in node.inputs:  # a subgraph reads it
                for axis in self._read(value) or ():
                    ax.pin(axis, Pin(node, "its subgraph reads all of it"))
        return operation

    def relate_state(self, old: ir.Value, new: ir.Value) -> None:
        """Relate the axes of a state to those of its new value, but for one along which it grows."""
        before, after = self.shared.get(old), self.shared.get(new)
        if before is None or after is None or len(before) != len(after):
            for axis in (*(before or ()), *(after or ())):
                ax.pin(axis, UNLIKE_STATES)
            return
        for axis, made in zip(before, after, strict=True):
            if ax.size_of(axis) == ax.size_of(made):
                ax.relate(axis, made)

    def _read(self, value: ir.Value | None) -> Axes:
        """The axes of a value for one reader."""
        if value is None:
            return None
        if not value.is_initializer():
            return self.shared[value] if value in self.shared else _computed(value, self.bound)
        shape = shape_of(value)
        if (source := source_of(value)) is not None and not source.has_fixed_shape:
            return self.shared.setdefault(value, tuple(_optional(value, source, axis) for axis in range(len(shape))))
        if value.dtype == ir.DataType.STRING:
            axes = _fresh(shape)
            for axis in axes or ():
                ax.pin(axis, Pin(None, "strings are not sharded"))
            return axes
        if sum(size != 1 for size in shape) < 2 or is_uniform(value):
            # Exporters merge equal weights: biases of zeros, norms of ones. Each use may need another shard.
            return _fresh(shape)
        return self.shared.setdefault(value, _fresh(shape))


def _own_axes(island: Island, inputs: Sequence[Axes], outputs: Sequence[Axes]) -> tuple[list[Axes], list[Axes]]:
    """The axes of an island's inputs and outputs, with new axes in place of those that are its own."""

    def renew(axes: Axes, numbers: Collection[int]) -> Axes:
        return axes and tuple(ax.new_axis(ax.size_of(a)) if n in numbers else a for n, a in enumerate(axes))

    own = [{axis for place, axis in island.inputs if place == number} for number in range(len(inputs))]
    return [renew(*pair) for pair in zip(inputs, own, strict=True)], [renew(axes, island.outputs) for axes in outputs]


def _settled(axis_map: AxisMap) -> AxisMap:
    """The map with each axis replaced by its leaves: atoms, and factors in sections. No axes are related afterwards."""
    leaves: dict[Axis, Axis] = {}

    def leaves_of(axis: Axis) -> Axis:
        if axis not in leaves:
            ax.flatten_sections(axis)
            leaves[axis] = tuple(ax.leaves(axis))
        return leaves[axis]

    def settle(axes: Axes) -> Axes:
        return None if axes is None else tuple([leaves_of(axis) for axis in axes])

    for operation in axis_map.operations.values():
        operation.inputs, operation.outputs = list(map(settle, operation.inputs)), list(map(settle, operation.outputs))
        operation.contracted, operation.reduced = leaves_of(operation.contracted), leaves_of(operation.reduced)
        operation.directions = leaves_of(operation.directions)
        for sizes in (*operation.sizes.values(), *operation.attributes.values()):
            for axis in (axis for axis in sizes if axis is not None):
                ax.flatten_sections(axis)
    return replace(axis_map, axes={value: settle(axes) for value, axes in axis_map.axes.items()})


def relate_node(operation: Operation) -> None:
    """Relate a node's axes by its operator's rule. Raises ModelError if the rule fails because the node is invalid.

    ONNX Runtime decides that: if it runs the node, the rule is wrong, and the rule's error is raised.
    """
    try:
        relate_axes(operation)
    except (IndexError, KeyError, TypeError, ValueError) as error:
        node = operation.node
        shapes = [None if axes is None else tuple(map(ax.size_of, axes)) for axes in operation.inputs]
        if (reason := refusal(node, shapes)) is None:
            raise
        raise ModelError(
            f"{describe_node(node)}: its attributes and the shapes of its values contradict: {reason}"
        ) from error


def _with_constant(graph: Graph, nodes: Collection[ir.Node]) -> list[ir.Node]:
    """The nodes and their constant ancestors, in the model's order."""
    constant = graph.constant
    needed = ancestors(nodes, lambda node: [value for value in graph.reads[node] if value.producer() in constant])
    return [node for node in graph.nodes if node in needed]


def _computed(value: ir.Value, bound: BoundShapes) -> Axes:
    """New axes for a value that is not a weight."""
    name = value.name or ""
    axes = _fresh(bound.shapes.get(name))
    unknown = bound.unknown.get(name, frozenset()) | bound.ones.get(name, frozenset())
    if axes is None or not unknown:
        return axes
    return tuple(ax.unknown_axis() if number in unknown else axis for number, axis in enumerate(axes))


def _fresh(shape: Shape | None) -> Axes:
    return None if shape is None else tuple(map(ax.new_axis, shape))


def _optional(value: ir.Value, source: OptionalOrigin, axis: int) -> Axis:
    """A new axis of an optional input. It is pinned if a request may change its size."""
    made = ax.new_axis(shape_of(value)[axis])
    if not source.is_fixed(axis):
        ax.pin(made, Pin(None, f"the optional input '{value.name}' may have another shape"))
    return made


def _entries(value: ir.Value, bound: BoundShapes) -> Sequence[int | None] | None:
    """As `BoundShapes.mixed`, also for a list that fusion added: it joins constants and computed numbers."""
    known, joins = bound.mixed.get(value.name or ""), made_by(value, "Concat")
    if known is not None or joins is None:
        return known
    parts: list[list[int | None] | None] = []
    for part in joins.inputs:
        shape, numbers = shape_of(part, bound.shapes), constant_numbers(part)
        parts.append(None if len(shape) != 1 else list(numbers) if numbers is not None else [None] * shape[0])
    return None if None in parts else [entry for part in parts for entry in part or ()]


def _constant(value: ir.Value | None, bound: BoundShapes) -> Array | None:
    """The value as an array if the bound shapes determine it and it is a few integers; else None."""
    if value is None or source_of(value) is not None:
        return None
    tensor = value.const_value
    if tensor is not None and tensor.size <= MOST_SIZES and tensor.dtype.is_integer():
        return tensor.numpy()
    return bound.constants.get(value.name or "")
