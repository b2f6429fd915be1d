"""Finds the batch axis, whose rows replicas divide, and tries in ONNX Runtime whether rows are independent."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, replace

import numpy as np
import onnx_ir as ir

from splitc.compiler.analysis.facts import Analysis
from splitc.compiler.errors import CannotSplitError
from splitc.compiler.graphs.reads import is_random
from splitc.compiler.inference.shapes import BoundShapes, bind_shapes
from splitc.compiler.nodes import describe_node, inputs_of
from splitc.compiler.normal_form.graph import Graph
from splitc.compiler.operators import axes as ax
from splitc.compiler.operators.operation import Axes
from splitc.compiler.operators.registry import operator_of
from splitc.compiler.remembered import remembered
from splitc.compiler.request.shapes import Shape
from splitc.compiler.sharding.axis_map import AxisMap, find_axes, probe_sizes, probes_of
from splitc.compiler.sharding.batch import BatchAxes, explain_no_rows, find_rows
from splitc.compiler.sharding.choice import Choice
from splitc.compiler.sharding.row_numbers import (
    RowNumbers,
    find_row_numbers,
    from_sizes,
    nodes_from_sizes,
)
from splitc.compiler.trials.by_rows import holds_by_rows
from splitc.compiler.trials.trial import find_broken
from splitc.runtime.arrays.array import Array

# More rows than any request has.
BEYOND = 10**9
# A number of rows for shape inference: a prime, so that it equals no other size. A choice.
SOME_ROWS = 67


class NoRowsError(CannotSplitError):
    """No axis of the model is a batch of independent rows, so replicas can't divide it."""


def tried_rows(analysis: Analysis) -> Mapping[str, int]:
    """By name, the batch axis of each output, and of each input that has one.

    A node whose axes rule does not hold when it is tried needs all rows. Raises NoRowsError, which names the node that
    mixes rows, if there is no batch axis.
    """
    rows = _rows_or_why(analysis)
    if isinstance(rows, str):
        raise NoRowsError(f"the rows of a batch can't be divided: {rows}")
    return rows.axes


def rows_of_micro_batches(analysis: Analysis) -> Mapping[str, int] | None:
    """As `tried_rows`; None if there is no batch axis."""
    rows = _rows_or_why(analysis)
    return None if isinstance(rows, str) else rows.axes


@remembered
def _rows_or_why(analysis: Analysis) -> BatchAxes | str:
    """The batch; or why there is none, and what to do. Cached, since auto mode needs it for each way."""
    graph = analysis.graph
    if drawn := next((node for node in graph.nodes if is_random(node)), None):
        return (
            f"{describe_node(drawn)} draws random numbers, and all groups of devices would draw the "
            "same. Use another --split-mode, without --batch-groups."
        )
    bound, opaque = analysis.costs.bound, _Opaque()
    for attempt in _attempts(analysis):
        rows, met = _search(analysis, attempt)
        if rows is not None:
            return _with_broadcast(analysis, rows)
        if attempt.explains:
            bound, opaque = attempt.bound, met
    numbers = find_row_numbers(graph, bound, opaque)
    axis_map = numbers.axis_map if numbers else find_axes(graph, bound, opaque)
    other = "Use another --split-mode, without --batch-groups, or export the model with an axis of independent rows."
    return f"{explain_no_rows(graph, axis_map, nodes_from_sizes(graph))}. {other}"


def _with_broadcast(analysis: Analysis, rows: BatchAxes) -> BatchAxes:
    """The batch, with the inputs that had one row for all when it was searched for, and may have as many as others."""
    bound = probes_of(analysis).broadcast(probe_sizes(analysis), rows.atoms[0].size)
    if bound is None:
        return rows
    more, _ = _search(analysis, _Attempt(bound, numbered=False, explains=False))
    return more if more is not None and rows.axes.items() <= more.axes.items() else rows


# Nodes that need all rows, and why.
_Opaque = dict[ir.Node, str]


@dataclass(frozen=True)
class _Attempt:
    """A search for the batch with these shapes, for which also row numbers may be computed (`numbered`).

    `explains`: what mixes rows here is the reason, unless a later attempt explains more.
    """

    bound: BoundShapes
    numbered: bool
    explains: bool

    def find(self, graph: Graph, opaque: _Opaque) -> tuple[AxisMap, RowNumbers | None] | None:
        """The axes, and the row numbers if there may be any. None if these can't be computed."""
        if not self.numbered:
            return find_axes(graph, self.bound, opaque), None
        numbers = find_row_numbers(graph, self.bound, opaque)
        return None if numbers is None else (numbers.axis_map, numbers)


def _attempts(analysis: Analysis) -> Iterator[_Attempt]:
    """The attempts to find a batch, in order."""
    probes, first = probes_of(analysis), probe_sizes(analysis)
    yield _Attempt(first, numbered=False, explains=True)
    yield _Attempt(first, numbered=True, explains=False)
    bound = first
    for bound in probes.with_same_axes():  # with these sizes the fewest axes seem to differ
        yield _Attempt(bound, numbered=True, explains=True)
    if (others := probes.multiples(first)) is not None:
        may_be_equal = bound is analysis.costs.certain  # planned sizes, as no primes fit
        yield _Attempt(others, numbered=False, explains=may_be_equal)
        if nodes_from_sizes(analysis.graph):
            yield _Attempt(others, numbered=True, explains=may_be_equal)


def _search(analysis: Analysis, attempt: _Attempt) -> tuple[BatchAxes | None, _Opaque]:
    """The batch that an attempt finds, after trying the rules; None if there is none. And the opaque nodes.

    A node whose rule does not hold becomes opaque, and axes are searched again.
    """
    graph, opaque = analysis.graph, _Opaque()
    while True:
        looked = attempt.find(graph, opaque)
        if looked is None:
            return None, opaque
        axis_map, numbers = looked
        rows = find_rows(graph, axis_map)
        if rows is None or (numbers is not None and not all(map(numbers.hold, rows.atoms))):
            return None, opaque
        known = frozenset[ir.Node]() if numbers is None else numbers.nodes | numbers.indexing.keys()
        tried = {node: operation for node, operation in axis_map.operations.items() if node not in known}
        broken = find_broken(analysis, replace(axis_map, operations=tried), Choice(rows.atoms))
        if broken:
            values = from_sizes(graph, axis_map.bound) if numbers is None else numbers.values
            broken = {
                node: why
                for node, why in broken.items()
                if not all(
                    holds_by_rows(axis_map.operations[node], atom, axis_map.bound.shapes, values) for atom in rows.atoms
                )
            }
        broken = broken or _not_growing(analysis, axis_map, rows)
        if not broken:
            return rows, opaque
        opaque.update(broken)


def _not_growing(analysis: Analysis, axis_map: AxisMap, rows: BatchAxes) -> dict[ir.Node, str]:
    """The first node whose number of rows is not proportional to the inputs', and why; empty if there is none.

    A Slice [:512] keeps all rows if there are fewer, and a rule may mistake a constant for a number of rows. So shapes
    are inferred once more, with more rows than any such Slice keeps.
    """
    if analysis.fitted.fills:
        return {}
    planned = planned_rows(analysis, rows.axes)
    times = 2 + max([bound // max(1, planned) for bound in _slice_ends(axis_map)], default=0)
    shapes = _resized(analysis.shapes, rows.axes, lambda size: size * times)
    grown, given = bind_shapes(analysis.graph.model, shapes, defaults=True), analysis.costs.bound
    uncertain = grown.uncertain | given.uncertain

    def grows(value: ir.Value, axes: Axes) -> bool:
        name = value.name or ""
        if axes is None or name in uncertain or not (name in grown.shapes and name in given.shapes):
            return True
        sizes = zip(axes, given.shapes[name], grown.shapes[name], strict=True)
        return all(more == size * times for axis, size, more in sizes if not atoms.isdisjoint(ax.leaves(axis)))

    atoms = frozenset(rows.atoms)
    few, many = from_sizes(analysis.graph, given), from_sizes(analysis.graph, grown)
    for node, operation in axis_map.operations.items():
        if not all(map(grows, node.outputs, operation.outputs)):
            return {node: "the size of its output is not proportional to their number"}
        if any(_follows(value, few, many) for value in inputs_of(node)):
            return {node: "it computes with their number"}
    return {}


def _follows(value: ir.Value, few: Mapping[ir.Value, Array], many: Mapping[ir.Value, Array]) -> bool:
    """Whether a value that is no size differs if there are more rows. `few` and `many` have what follows from sizes."""
    if value not in few or value not in many or few[value].dtype.kind in "iu":
        return False
    return few[value].shape == many[value].shape and not np.array_equal(few[value], many[value])


def _slice_ends(axis_map: AxisMap) -> Iterator[int]:
    """The ends of Slices that may cut off rows; tf2onnx writes 10^9 for the end of an axis."""
    for node, operation in axis_map.operations.items():
        if node.op_type == "Slice" and not node.domain:
            yield from (end for end in operation.numbers(2, "ends") or () if 0 < end < BEYOND)


def planned_rows(analysis: Analysis, axes: Mapping[str, int]) -> int:
    """The planned number of rows."""
    return max(shape[axes[name]] for name, shape in analysis.shapes.items() if name in axes)


@remembered
def _with_rows(analysis: Analysis, axes: frozenset[tuple[str, int]], rows: int, whole: int) -> Analysis:
    def cut(shapes: Mapping[str, Shape], most: int) -> dict[str, Shape]:
        return _resized(shapes, dict(axes), lambda size: max(1, -(-size * most // max(1, whole))))

    shapes = cut(analysis.shapes, rows)
    bound = bind_shapes(analysis.graph.model, shapes, defaults=True)
    return replace(
        analysis,
        shapes=shapes,
        smallest=cut(analysis.smallest, 1),
        typical=cut(analysis.typical, rows),
        costs=replace(analysis.costs, bound=bound),
    )


def _resized(shapes: Mapping[str, Shape], axes: Mapping[str, int], size: Callable[[int], int]) -> dict[str, Shape]:
    """The shapes with another `size` along these axes, by name."""
    return {
        name: tuple(size(own) if number == axes.get(name) else own for number, own in enumerate(shape))
        for name, shape in shapes.items()
    }


def with_rows(analysis: Analysis, axes: Mapping[str, int], rows: int) -> Analysis:
    """The analysis for this number of the planned rows. It is unchanged if sizes depend on data."""
    whole = planned_rows(analysis, axes)
    if rows == whole or analysis.fitted.fills or analysis.costs.bound.uncertain:
        return analysis
    return _with_rows(analysis, frozenset(axes.items()), rows, whole)


def row_sources(analysis: Analysis, axes: Mapping[str, int]) -> list[str]:
    """The inputs that must have all rows of a request that is divided. Any other may have one row, which is broadcast.

    Outputs still have all rows then, and so has each value whose sizes are read: row numbers are computed from these,
    and may index values with more rows. Inputs are tried with one row, smallest first, such as a timestep or positions.
    States are not, since the request adds rows to them.
    """
    graph, states = analysis.graph, {state.input for state in analysis.states}
    sources = [value.name or "" for value in graph.graph.inputs if value.name in axes]
    read = [node.inputs[0] for node in graph.nodes if operator_of(node).reads_shape]
    names = {value.name or "" for value in (*graph.outputs, *read) if value is not None}

    def made(of_all: Collection[str]) -> tuple[Mapping[str, Shape], frozenset[str]]:
        shapes = _resized(analysis.shapes, axes, lambda _: 1)
        shapes |= _resized({name: analysis.shapes[name] for name in of_all}, axes, lambda _: SOME_ROWS)
        bound = bind_shapes(graph.model, shapes, defaults=True)
        return {name: bound.shapes[name] for name in names if name in bound.shapes}, bound.uncertain & names

    whole = made(sources)
    for name in sorted(set(sources) - states, key=lambda name: (math.prod(analysis.shapes[name]), name)):
        left = [source for source in sources if source != name]
        if not whole[1] and made(left) == whole:
            sources = left
    return sources
