"""Finds indices that are row numbers, computed from sizes alone, by which each row reads only its own entries.

Exporters write attention masks so: `mask[arange(rows)[:, None], columns]`. By the operators' rules an index may point
to any row. But values that depend on sizes alone can be computed. If an index equals the position along an axis
everywhere, each row gathers from itself, and rows stay independent. There are three more forms:

- Rotary embeddings, whose tables may have a row for each token of a request.
- Writing a part of a mask: a ScatterND with such an index.
- `x[arange(rows), highest]` with rows and tokens merged into one axis: the index is the number of the row's first token
  plus that of a token in its row.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import onnx_ir as ir

from splitc.compiler.graphs.alone import nodes_between, run_part
from splitc.compiler.graphs.matching import is_onnx, made_by, source_through
from splitc.compiler.graphs.reads import holds_graphs, is_random, read_sizes
from splitc.compiler.inference.shapes import BoundShapes
from splitc.compiler.nodes import input_at, inputs_of, known_weight
from splitc.compiler.normal_form.graph import Graph
from splitc.compiler.operators import axes as ax
from splitc.compiler.operators.axes import Axis, Factor
from splitc.compiler.operators.indexing import SELECTS, WRITES
from splitc.compiler.operators.operation import Operation
from splitc.compiler.operators.registry import operator_of
from splitc.compiler.sharding.axis_map import AxisMap, find_axes
from splitc.runtime.arrays.array import Array

# The operators that gather or scatter by an index, which is their second input.
SCATTER = "ScatterND"
INDEXING = ("Gather", "GatherND", SCATTER)
# The most elements of a computed value. A choice: at probe sizes masks have thousands.
MOST_ELEMENTS = 1 << 22


@dataclass(frozen=True)
class RowNumbers:
    """The axes of a model whose nodes index by row numbers.

    - `nodes`: the nodes that compute from sizes alone.
    - `indexing`: the nodes that gather or scatter by row numbers, each with the axes of its index along which the index
      is the position and nothing else.
    - `joining`: the nodes that build an index from such numbers and other data, each with the node that reads it.
    - `values`: values that depend on sizes alone, computed for probe sizes.
    """

    graph: Graph
    axis_map: AxisMap
    nodes: frozenset[ir.Node]
    indexing: Mapping[ir.Node, frozenset[int]]
    joining: Mapping[ir.Node, ir.Node]
    values: Mapping[ir.Value, Array]

    def hold(self, atom: Factor) -> bool:
        """Whether values computed from sizes are the same for all rows (`atom`), wherever nodes read them with data.

        Values that differ may make a node treat rows differently. Row numbers as an index do not count.
        """
        if any(self._differs(value, self.axis_map.axes[value] or (), atom) for value in self.graph.outputs):
            return False
        for node, operation in self.axis_map.operations.items():
            if node in self.nodes:
                continue
            for number, (value, axes) in enumerate(zip(node.inputs, operation.inputs, strict=True)):
                by = node if number == _index_of(node) else None
                known = self.indexing.get(self.joining.get(node, by), frozenset())  # type: ignore[arg-type]
                if value is not None and self._differs(value, axes or (), atom, known):
                    return False
        return True

    def _differs(
        self, value: ir.Value, axes: Sequence[Axis], atom: Factor, known: frozenset[int] = frozenset()
    ) -> bool:
        """Whether a value computed from sizes varies along a factor, apart from the `known` axes."""
        if value.producer() not in self.nodes:
            return False
        along = [number for number, axis in enumerate(axes) if atom in ax.atoms(axis) and number not in known]
        if not along or value not in self.values:
            return bool(along)
        return any(_varies_along(atom, self.values[value], number, axes[number]) for number in along)


def _index_of(node: ir.Node) -> int:
    """The number of a node's index input."""
    operator = operator_of(node)
    return operator.positions[0] if operator.tables else 1


def _varies(array: Array, axis: int) -> bool:
    """Whether an array varies along an axis."""
    return array.size > 0 and not np.array_equal(array, np.broadcast_to(array.take([0], axis), array.shape))


def _varies_along(atom: Factor, array: Array, number: int, axis: Axis) -> bool:
    """Whether an array varies along a factor of an axis: in an axis of rows and tokens, tokens may vary."""
    leaves = ax.leaves(axis)
    if atom not in leaves:  # it is in sections
        return _varies(array, number)
    parts = array.reshape(*array.shape[:number], *(leaf.size for leaf in leaves), *array.shape[number + 1 :])
    return any(_varies(parts, number + place) for place, leaf in enumerate(leaves) if leaf is atom)


def find_row_numbers(graph: Graph, bound: BoundShapes, opaque: Mapping[ir.Node, str]) -> RowNumbers | None:
    """The axes of a model in which nodes index by row numbers; None if no node computes from sizes alone.

    A whole mask may depend on sizes alone: then it was indexed by row numbers inside the nodes that compute it.
    """
    nodes = nodes_from_sizes(graph)
    if not nodes:
        return None
    indices = {
        node: parts
        for node in graph.nodes
        if node not in nodes and is_onnx(node, *INDEXING)
        if (parts := _parts(node, nodes)) and any(part.producer() in nodes for part in parts)
    }
    turning = {
        node: index
        for node in graph.nodes
        if operator_of(node).tables and (index := input_at(node, _index_of(node))) is not None
        if index.producer() in nodes
    }
    values = from_sizes(graph, bound)
    aligned: dict[ir.Node, frozenset[int]] = {}
    rules: dict[ir.Node, Callable[[Operation], None]] = dict.fromkeys(nodes - opaque.keys(), _free_rule)
    for node, parts in indices.items():
        if node not in opaque:
            rule = _scatter_rule if node.op_type == SCATTER else partial(_gather_rule, _count_below(parts[-1], bound))
            rules[node] = partial(rule, [values.get(part) for part in parts], aligned)
    for node, index in turning.items():
        if node not in opaque:
            rules[node] = partial(_lookup_rule, values.get(index), aligned)
    axis_map = find_axes(graph, bound, opaque, rules=rules)
    joining = {
        producer: node
        for node, parts in indices.items()
        if len(parts) > 1 and (producer := node.inputs[1].producer()) is not None  # type: ignore[union-attr]
    }
    return RowNumbers(graph, axis_map, frozenset(nodes), aligned, joining, values)


def _parts(reader: ir.Node, nodes: set[ir.Node]) -> Sequence[ir.Value]:
    """The parts of an index, one for each indexed axis; or the index itself.

    Only an index that contains other data is split into parts: any other is computed as a whole by `nodes`. A Gather's
    index may be a sum: its parts are a value from sizes, and data.
    """
    index = reader.inputs[1]
    if index is None:
        return ()
    node = index.producer()
    if node is None or node in nodes or index.is_graph_output() or _data_readers(index) != {reader}:
        return (index,)
    if node.op_type == "Add" and reader.op_type == "Gather":
        one, other = sorted(filter(None, node.inputs), key=lambda part: part.producer() not in nodes)
        return (one, other) if _choice(other) is not None else (index,)
    if node.op_type != "Concat" or index.shape is None:
        return (index,)
    last = node.attributes.get_int("axis", 0) in (-1, len(index.shape) - 1)
    parts = inputs_of(node)
    single = all(value.shape is not None and value.shape[-1] == 1 for value in parts)
    return parts if last and single else (index,)


def _data_readers(value: ir.Value) -> set[ir.Node]:
    """The nodes that read a value's contents, rather than only its sizes."""
    return {node for node, _ in value.uses() if not operator_of(node).reads_shape}


def _choice(index: ir.Value) -> ir.Node | None:
    """The ArgMax or ArgMin that computes an index, which is thus below the size of its axis; else None."""
    return made_by(source_through(index, "Cast"), "ArgMax", "ArgMin")


def _count_below(index: ir.Value, bound: BoundShapes) -> int:
    """An upper bound that an index is below; 1 if none is known."""
    node = _choice(index)
    source = None if node is None else node.inputs[0]
    shape = () if source is None else bound.shapes.get(source.name or "", ())
    return shape[node.attributes.get_int("axis", 0)] if node is not None and shape else 1


def from_sizes(graph: Graph, bound: BoundShapes) -> dict[ir.Value, Array]:
    """The values, for these sizes, that are computed from sizes alone and that are outputs or that other nodes read.

    Empty if they can't be computed.
    """
    nodes = nodes_from_sizes(graph)
    outside = [(node, value) for node in graph.nodes if node not in nodes for value in graph.reads[node]]
    wanted = dict.fromkeys(value for _, value in outside if value.producer() in nodes)
    wanted.update(dict.fromkeys(value for value in graph.graph.outputs if value.producer() in nodes))
    wanted = {value: None for value in wanted if np.prod(bound.shapes.get(value.name or "", ())) <= MOST_ELEMENTS}
    known: dict[ir.Value, Array] = {}
    for node in (node for node in nodes if operator_of(node).reads_shape):
        source = node.inputs[0]
        if source is not None and (shape := bound.shapes.get(source.name or "")) is not None:
            known[node.outputs[0]] = read_sizes(node, shape)
    if not nodes_between(known, list(wanted)) <= nodes | graph.constant:  # it needs a size that is not known
        return {}
    try:
        return dict(zip(wanted, run_part(graph.graph, known, list(wanted)), strict=True))
    except Exception:  # whatever it refuses: nothing is known then
        return {}


def nodes_from_sizes(graph: Graph) -> set[ir.Node]:
    """The nodes that compute from sizes alone: from values' sizes, and from constants."""
    made: set[ir.Node] = set()
    for node, reads in graph.reads.items():
        if is_random(node) or holds_graphs(node) or node in graph.constant:
            continue
        if operator_of(node).reads_shape or all(_is_known(graph, value, made) for value in reads):
            made.add(node)
    return made


def _is_known(graph: Graph, value: ir.Value, made: set[ir.Node]) -> bool:
    if value.producer() in made or value.producer() in graph.constant:
        return True
    return known_weight(value) is not None


def _free_rule(operation: Operation) -> None:
    """The axes rule of a node that computes from sizes: none are related, as `hold` examines the values themselves."""
    for axes in (*operation.inputs, *operation.outputs):
        operation.free(axes or ())


def _gather_rule(
    below: int, index: Sequence[Array | None], aligned: dict[ir.Node, frozenset[int]], operation: Operation
) -> None:
    """The axes rule of a node that gathers, where its index is the position along an axis.

    The index is one array, or has one part for each indexed axis: an array, or None for data. A Gather's may be an
    array to which data, smaller than `below`, are added. If the index is nowhere the position, the operator's rule is
    applied. Otherwise the node is added to `aligned`, with the axes of the index along which the index is the position.
    """
    data, indices, output = operation.input(0), operation.input(1), operation.output()
    if operation.node.op_type == "Gather":
        first = operation.number("axis", 0) % len(data)
        columns, places, behind = list(index[:1]), indices, first + 1
    else:
        first = operation.number("batch_dims", 0)
        columns = [column for part in index for column in _columns(part)]
        places, behind = indices[:-1], first + len(columns)
    pairs, loose = _paired(columns, data[first:behind], below if len(index) > len(columns) else 1)
    if not pairs:
        rule = operator_of(operation.node).axes
        assert rule is not None, "an operator that gathers has a rule"
        rule(operation)
        return
    aligned[operation.node] = frozenset(place for _, place in pairs) - loose
    related = {leaf for leaf, _ in pairs}
    for axis in data[first:behind]:
        operation.free([axis])
        operation.whole([(leaf,) for leaf in ax.leaves(axis) if leaf not in related], SELECTS)
    start = first if operation.node.op_type == "Gather" else 0
    operation.relate_all(data[:first], output)
    operation.relate_all(places, output[start:])
    operation.relate_all(data[behind:], output[len(output) - len(data[behind:]) :])
    operation.free(indices)
    for leaf, number in pairs:
        operation.relate((leaf,), places[number])


def _scatter_rule(index: Sequence[Array | None], aligned: dict[ir.Node, frozenset[int]], operation: Operation) -> None:
    """The axes rule of a node that scatters updates by an index; see `_gather_rule`."""
    data, indices, updates, output = *map(operation.input, range(3)), operation.output()
    columns = [column for part in index for column in _columns(part)]
    places, behind = updates[: len(indices) - 1], len(columns)
    pairs, loose = _paired(columns, data[:behind])
    related, numbers = {leaf for leaf, _ in pairs}, frozenset(number for _, number in pairs)
    aligned[operation.node] = numbers - loose
    for axis in data[:behind]:
        operation.whole([(leaf,) for leaf in ax.leaves(axis) if leaf not in related], WRITES)
    operation.whole([axis for number, axis in enumerate(places) if number not in numbers], WRITES)
    operation.relate_all(data, output)
    operation.relate_all(updates[len(places) :], output[behind:])
    operation.relate_all(indices[:-1], places)
    operation.free(indices[-1:])
    for leaf, number in pairs:
        operation.relate((leaf,), places[number])


def _paired(
    columns: Sequence[Array | None], axes: Sequence[Axis], below: int = 1
) -> tuple[list[tuple[Factor, int]], set[int]]:
    """Pairs: a factor of these axes, and an axis of the index along which the index is the position in that factor.

    A column is the index along one axis. With `below` above 1, it is the start of `below` consecutive elements, those
    of the axis's last factors. Also returns the axes of the index along which a column varies otherwise.
    """
    pairs: list[tuple[Factor, int]] = []
    loose: set[int] = set()
    for column, axis in zip(columns, axes, strict=True):
        if column is None:
            continue
        leaves = ax.leaves(axis)
        sizes = [leaf.size for leaf in leaves]
        column = np.where(column < 0, column + ax.size_of(axis), column)
        if below > 1:
            count = next((n for n in range(len(sizes)) if np.prod(sizes[n:]) == below), 0)
            leaves, sizes = leaves[:count], sizes[:count]
            column = np.where(column % below == 0, column // below, -1)
        if leaves and column.size and column.min() >= 0 and column.max() < np.prod(sizes):
            for leaf, own in zip(leaves, np.unravel_index(column, sizes), strict=True):
                own_places = list(_places(own, leaf.size))
                pairs += [(leaf, place) for place in own_places]
                loose |= {n for n in range(own.ndim) if n not in own_places and _varies(own, n)}
        else:
            loose |= {n for n in range(column.ndim) if _varies(column, n)}
    return pairs, loose


def _lookup_rule(index: Array | None, aligned: dict[ir.Node, frozenset[int]], operation: Operation) -> None:
    """The axes rule of a node with tables. A table's rows are the axis of positions if these count from 0."""
    operator = operator_of(operation.node)
    assert operator.axes is not None, "an operator with tables has a rule"
    operator.axes(operation)
    places = operation.input(operator.positions[0])
    for table in (operation.input(number) for number in operator.tables if operation.has(number)):
        leaves = ax.leaves(table[0])
        if len(leaves) == 1 and not leaves[0].is_atom:  # exporters append rows up to some minimum
            leaves = ax.leaves(leaves[0].sections[0])
        sizes = [leaf.size for leaf in leaves]
        if index is None or not leaves or not index.size or index.min() < 0 or index.max() >= np.prod(sizes):
            continue
        own = [
            list(_places(column, leaf.size))
            for leaf, column in zip(leaves, np.unravel_index(index, sizes), strict=True)
        ]
        if all(own):
            operation.free([table[0]])
            for leaf, numbers in zip(leaves, own, strict=True):
                operation.relate((leaf,), places[numbers[0]])
            aligned[operation.node] = frozenset(number for numbers in own for number in numbers)


def _columns(part: Array | None) -> list[Array | None]:
    """The columns of a part of an index: one for each axis that it indexes; None for data."""
    return [None] if part is None else [part[..., number] for number in range(part.shape[-1])]


def _places(column: Array, size: int) -> Iterator[int]:
    """The axes of a column along which each entry is its position."""
    for number, length in enumerate(column.shape):
        own = np.arange(length).reshape([-1 if n == number else 1 for n in range(column.ndim)])
        if length == size and np.array_equal(column, np.broadcast_to(own, column.shape)):
            yield number
