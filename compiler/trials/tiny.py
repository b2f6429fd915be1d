"""Forms as one model of tiny, unconnected nodes, and its shards on three ranks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import onnx_ir as ir

from splitc.compiler.analysis.stages import Stage
from splitc.compiler.engine_graphs.missing_kernels import NARROW, WIDE
from splitc.compiler.graphs.origins import mark_origins
from splitc.compiler.inference.shapes import BoundShapes
from splitc.compiler.lowering.size_rewriter import constant_sizes, local_attribute
from splitc.compiler.nodes import inputs_of
from splitc.compiler.normal_form.graph import Graph
from splitc.compiler.operators import axes as ax
from splitc.compiler.operators.axes import Axis, Factor
from splitc.compiler.operators.operation import Axes, Operation, Sizes
from splitc.compiler.operators.registry import operator_of
from splitc.compiler.sharding.axis_map import AxisMap
from splitc.compiler.sharding.partial import Sums
from splitc.compiler.sharding.sharded_model import ShardedModel
from splitc.compiler.sharding.shards import Shards
from splitc.compiler.sharding.shares import Range, Ranges, divide_units, ranges_of
from splitc.compiler.trials.forms import LARGE, PARTNER, SHARDED, Form, content_of, is_tried, mixed_of
from splitc.compiler.trials.made_up import made_up, made_up_sum, parts_of
from splitc.runtime.arrays.array import Array
from splitc.runtime.engines.widened import OF_TYPES

# Ranks of a trial: one is neither the first nor the last, and one may have nothing.
RANKS = 3
# The units of each rank, for the first sharded axis of a form, the second, and so on. One rank has none.
UNITS = ((2, 0, 3), (0, 4, 3), (6, 5, 0), (3, 0, 10))
# For operators that require multiples of 8.
EVEN_UNITS = ((8, 0, 16), (0, 16, 8), (16, 8, 0), (8, 0, 16))
# For the two directions of a recurrent network.
DIRECTIONS = (1, 0, 1)
# The ranks' shares of an axis of OUTER units together with its partner.
SHARES, OUTER = (0.3, 0.2, 0.5), 2
# The most bytes of a value that is tried. A choice: most operators take sizes of 12.
MOST_BYTES = 1 << 25
# With `few`: the most elements along all axes that are not sharded. A choice: six axes of two.
FEW = 1 << 6


class CannotTryError(Exception):
    """The form of this number can't be tried at these sizes."""

    def __init__(self, number: int, reason: str) -> None:
        super().__init__(reason)
        self.number = number


@dataclass(frozen=True)
class Sizing:
    """How sizes are made up.

    - `units`: the units of sharded axes.
    - `planned`: other axes have the planned sizes, not probe sizes.
    - `largest`: larger sizes are replaced by small ones.
    - `single`: the first axis has size 1.
    - `few`: most axes that are not sharded have size 1.
    """

    units: Sequence[tuple[int, ...]]
    planned: bool
    largest: int
    single: bool = False
    few: bool = False


# In the order in which they are tried, until one suits the operator.
SIZINGS = (
    *(Sizing(UNITS, planned, largest) for planned in (False, True) for largest in (LARGE, 256, 4, MOST_BYTES)),
    *(Sizing(UNITS, planned, 256, single=True) for planned in (False, True)),
    *(Sizing(EVEN_UNITS, planned, 256, single) for single in (False, True) for planned in (False, True)),
    *(Sizing(UNITS, planned, 256, few=True) for planned in (False, True)),
)


@dataclass(frozen=True)
class TinyModel:
    """One tiny node per form, in the forms' order. `feeds` are its data, `parts` each rank's summand, by input name."""

    sharded: ShardedModel
    stage: Stage
    nodes: Sequence[ir.Node]
    feeds: Mapping[str, Array]
    parts: Mapping[str, Sequence[Array]]


def tiny_model(forms: Sequence[Form], sizing: Sizing, versions: Mapping[str, int], bound: BoundShapes) -> TinyModel:
    """The model of these forms. Raises CannotTryError for inputs that are too large, or of unknown shape or type."""
    makers = [_Maker(form, sizing, number) for number, form in enumerate(forms)]
    nodes = [maker.build() for maker in makers]
    operations = {node: maker.made for node, maker in zip(nodes, makers, strict=True)}
    axes: dict[ir.Value, Axes] = {}
    ranges: Ranges = {}
    for maker, node in zip(makers, nodes, strict=True):
        ranges.update(maker.ranges)
        axes.update(maker.made.reads())
        axes.update(zip(node.outputs, maker.made.outputs, strict=True))
    graph = _graph(nodes, makers, versions)
    sums = Sums(
        {
            value: frozenset()
            for form, node in zip(forms, nodes, strict=True)
            if form.gives_partial
            for value in node.outputs
        },
        (),
        {node: form.add_on_one_rank for form, node in zip(forms, nodes, strict=True) if form.add_on_one_rank},
        tuple(node for form, node in zip(forms, nodes, strict=True) if form.is_reduced),
    )
    empty = replace(bound, shapes={}, constants={})
    sharded = ShardedModel(graph, AxisMap(operations, axes, empty), ranges, RANKS, sums)
    stage = Stage((), tuple(nodes), tuple(graph.graph.inputs), (), (), tuple(graph.graph.outputs), ())
    feeds = {name: array for maker in makers for name, array in maker.feeds.items()}
    parts = {name: arrays for maker in makers for name, arrays in maker.parts.items()}
    return TinyModel(sharded, stage, nodes, feeds, parts)


def _graph(nodes: Sequence[ir.Node], makers: Sequence[_Maker], versions: Mapping[str, int]) -> Graph:
    values = [value for maker in makers for value in maker.values.values()]
    initializers = [value for value in values if value.const_value is not None]
    inputs = [value for value in values if value.const_value is None]
    outputs = [value for node in nodes for value in node.outputs if value.name]
    graph = ir.Graph(
        inputs, outputs, nodes=nodes, initializers=initializers, opset_imports=dict(versions), name="forms"
    )
    mark_origins(graph)
    reads = {node: tuple(inputs_of(node)) for node in nodes}
    return Graph(Path(), ir.Model(graph, ir_version=10), reads, {}, ())


class _Maker:
    """Builds the tiny node of one form, with its axes, its data and the units of each rank."""

    def __init__(self, form: Form, sizing: Sizing, number: int) -> None:
        self.values: dict[tuple[ir.Value, int], ir.Value] = {}
        self.feeds: dict[str, Array] = {}
        self.parts: dict[str, Sequence[Array]] = {}
        self._form, self._number, self._name = form, number, f"f{number}"
        own = _units(form, sizing.units)
        sizes = _tiny_sizes(form, sizing, own)
        # The tiny node is that of a rank with these numbers of units.
        self._tiny = Shards({atom: Range(0, size) for atom, size in sizes.items()})
        self._factors = {atom: Factor(size, pinned=atom.pinned) for atom, size in sizes.items()}
        self.ranges: Ranges = {
            self._factors[atom]: [replace(run, partner=run.partner and self._factors[run.partner]) for run in ranges]
            for atom, ranges in own.items()
        }
        self.made = self._operation(form.operation)

    def build(self) -> ir.Node:
        """The node, with its made-up inputs in `values`, `feeds` and `parts`."""
        node, sizes = self._form.node, self._form.operation.attributes
        self.made.node = ir.Node(
            node.domain,
            node.op_type,
            [self._input(number) for number in range(len(node.inputs))],
            [
                local_attribute(self._tiny, node, name, sizes[name]) if name in sizes else _widened(attribute)
                for name, attribute in node.attributes.items()
            ],
            outputs=[
                ir.Value(name=f"{self._name}_o{n}" if is_tried(value, axes) else "", type=_wide_type(value))
                for n, (value, axes) in enumerate(zip(node.outputs, self.made.outputs, strict=True))
            ],
            name=self._name,
        )
        return self.made.node

    def _operation(self, operation: Operation) -> Operation:
        """The node's operation with tiny axes."""
        return replace(
            operation,
            inputs=[self._axes(axes) for axes in operation.inputs],
            outputs=[self._axes(axes) for axes in operation.outputs],
            contracted=self._axis(operation.contracted),
            reduced=self._axis(operation.reduced),
            directions=self._axis(operation.directions),
            sizes={number: self._sizes(sizes) for number, sizes in operation.sizes.items()},
            attributes={name: self._sizes(sizes) for name, sizes in operation.attributes.items()},
        )

    def _axes(self, axes: Axes) -> Axes:
        return None if axes is None else tuple(map(self._axis, axes))

    def _sizes(self, sizes: Sizes) -> Sizes:
        return [None if axis is None else self._axis(axis) for axis in sizes]

    def _axis(self, axis: Axis) -> Axis:
        return tuple(self._leaf(leaf) for leaf in ax.leaves(axis))

    def _leaf(self, leaf: Factor) -> Factor:
        if leaf not in self._factors:
            if leaf.is_atom:  # of an axis that only a list of sizes names
                return Factor(leaf.size)
            sections = tuple(map(self._axis, leaf.sections))
            self._factors[leaf] = Factor(sum(map(ax.size_of, sections)), sections=sections)
        return self._factors[leaf]

    def _input(self, number: int) -> ir.Value | None:
        node, operation = self._form.node, self._form.operation
        value = node.inputs[number]
        if value is None:
            return None
        # Weights have axes of their own at each use.
        key = (value, number if value.is_initializer() else -1)
        if key not in self.values:
            axes = self.made.inputs[number]
            if axes is None or value.dtype is None:
                raise CannotTryError(self._number, f"the shape or the type of its input {number} is not known")
            shape, kind = tuple(map(ax.size_of, axes)), _wide_type(value)
            dtype = value.dtype if kind is None else kind.dtype
            is_sum = number in self._form.partial
            array = made_up_sum(shape, dtype, self._name) if is_sum else self._array(operation, number, shape, dtype)
            name = f"{self._name}_i{number}"
            self.values[key] = ir.Value(name=name, shape=ir.Shape(array.shape), type=kind)
            if value.is_initializer():
                self.values[key].const_value = _tensor(array, dtype, name)
            else:
                self.feeds[name] = array
                if is_sum:
                    self.parts[name] = parts_of(array, self._name)
        return self.values[key]

    def _array(self, operation: Operation, number: int, shape: tuple[int, ...], dtype: ir.DataType) -> Array:
        content, sizes = content_of(operation, number), operation.sizes.get(number)
        item = np.dtype(object).itemsize if dtype == ir.DataType.STRING else dtype.itemsize
        if np.prod(shape, dtype=np.float64) * item > MOST_BYTES:
            raise CannotTryError(self._number, f"its input {number} is too large to be tried")
        if sizes is not None and content is not None:
            flat = np.atleast_1d(content)
            new = constant_sizes(self._tiny, flat, sizes, operator_of(operation.node).sizes_are_offsets)
            return np.asarray(new.reshape(content.shape))
        if sizes is None and content is not None and content.shape == shape:
            return np.asarray(content)
        likely, known = made_up(self.made, number, shape, dtype, self._name), mixed_of(operation, number)
        if sizes is not None:
            known = [None if axis is None else self._tiny.size(axis) for axis in sizes]
        if known:
            others = likely.flat if _has_example(self.made, number) else np.ones(len(known), np.int64)
            entries = [n if entry is None else entry for entry, n in zip(known, others, strict=True)]
            return np.array(entries, dtype.numpy()).reshape(shape)
        return likely


def _wide_type(value: ir.Value) -> ir.TypeProtocol | None:
    """The type that a value has in a trial: float32 for bfloat16, which the CPU provider has hardly any kernel for.

    Axes are the same.
    """
    return ir.TensorType(WIDE) if value.type == ir.TensorType(NARROW) else value.type


def _widened(attribute: ir.Attr) -> ir.Attr:
    return ir.AttrInt64(attribute.name, WIDE) if attribute.name in OF_TYPES and attribute.value == NARROW else attribute


def _has_example(operation: Operation, number: int) -> bool:
    """Whether an input can't hold arbitrary numbers."""
    example = operator_of(operation.node).example_input
    return example is not None and example(operation, number) is not None


def _tiny_sizes(form: Form, sizing: Sizing, own: Mapping[Factor, Sequence[Range]]) -> dict[Factor, int]:
    """The size of each of a form's atoms. `own` are the ranks' units of those that are sharded."""
    operation, known = form.operation, form.planned if sizing.planned else {}
    sizes = {atom: known.get(atom, atom.size) for atom in form.atoms}
    windows, exact = (
        {atom: sizes[atom] for axis in axes for atom in ax.atoms(axis) if atom in sizes}
        for axes in (operation.windows, operation.exact)
    )
    least = max([5, *windows.values()])
    large = sorted({size for atom, size in sizes.items() if size > sizing.largest and atom not in exact})
    sizes = {atom: least + large.index(size) if size in large else size for atom, size in sizes.items()}
    sizes |= windows | exact
    if sizing.few:
        sizes = _few({atom: size for atom, size in sizes.items() if atom not in own}) | windows | exact
    if sizing.single and operation.inputs[0]:
        sizes |= dict.fromkeys(ax.atoms(operation.inputs[0][0]), 1)
    sizes |= {atom: max(run.stop for run in ranges) for atom, ranges in own.items()}
    return sizes | {atom: max(sizes.values()) for atom in _rows_of_tables(form) if atom not in own}


def _few(sizes: Mapping[Factor, int]) -> dict[Factor, int]:
    """The first of these sizes, up to a product of FEW, and 1 for the others: windows have many axes of size two."""
    result, room = {}, FEW
    for atom, size in sizes.items():
        result[atom] = size if size <= room else 1
        room //= max(1, result[atom])
    return result


def _rows_of_tables(form: Form) -> set[Factor]:
    """The atoms of rows that are looked up by position: tables have a row for each position, whatever their number."""
    inputs = form.operation.inputs
    tables = (inputs[number] for number in operator_of(form.node).tables if number < len(inputs))
    return {atom for axes in tables if axes for atom in ax.atoms(axes[0]) if atom in form.atoms}


def _units(form: Form, units: Sequence[tuple[int, ...]]) -> dict[Factor, list[Range]]:
    """Each rank's units of the form's sharded axes."""
    ranges: dict[Factor, list[Range]] = {}
    place = 0
    for atom, role in form.atoms.items():
        if atom in form.inner:
            inner = sum(units[place % len(units)])
            partner = form.inner[atom]
            ranges[atom], ranges[partner] = divide_units(OUTER, inner, SHARES, partner)
        elif role == SHARDED or (role == PARTNER and atom not in form.inner.values()):
            is_direction = atom in ax.atoms(form.operation.directions)
            ranges[atom] = ranges_of(DIRECTIONS if is_direction else units[place % len(units)])
        else:
            continue
        place += 1
    return ranges


def _tensor(array: Array, dtype: ir.DataType, name: str) -> ir.TensorProtocol:
    if dtype == ir.DataType.STRING:
        return ir.StringTensor(np.char.encode(array.astype(str)).astype(object), name=name)
    return ir.Tensor(array, dtype, name=name)
