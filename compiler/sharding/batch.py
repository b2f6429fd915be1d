"""Finds the batch axis, along which no node mixes rows, or says why there is none."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass

import onnx_ir as ir

from splitc.compiler.nodes import describe_node
from splitc.compiler.normal_form.graph import Graph
from splitc.compiler.operators import axes as ax
from splitc.compiler.operators.axes import Factor
from splitc.compiler.operators.operation import Axes, Operation
from splitc.compiler.operators.registry import operator_of
from splitc.compiler.sharding.axis_map import AxisMap

Places = dict[Factor, dict[str, int]]


@dataclass(frozen=True)
class BatchAxes:
    """The batch: its factors (`atoms`), and by name the batch axis of each output, and of each input that has one.

    There are several factors if no node relates them, as for an input that is returned unchanged. All have the same
    size in every request, and no value has two of them.
    """

    atoms: tuple[Factor, ...]
    axes: Mapping[str, int]


def find_rows(graph: Graph, axis_map: AxisMap) -> BatchAxes | None:
    """The batch; None if there is none.

    It is a factor of dynamic size, alone on its axis. No weight has it, and all outputs do, except those that depend on
    weights alone. No node needs it whole, sums over it or indexes it. An input has it that does not only choose among
    computed values: all of these would be computed for each of its rows. If no factor is in all outputs, or one of
    its symbol is elsewhere, several of one symbol may be the batch.
    """
    mixed = _mixed(axis_map)
    outputs = set(_outputs(graph))
    if not outputs:
        return None
    places = {
        atom: number_of
        for atom, number_of in _places(graph, axis_map).items()
        if atom.pinned is None and atom not in mixed
    }
    for atom, number_of in places.items():
        if outputs <= number_of.keys():
            rows = BatchAxes((atom,), number_of)
            if _has_all(graph, rows):
                return rows
    groups: dict[str, list[Factor]] = {}
    for atom in places:
        for symbol in _symbols(graph, places[atom]):
            groups.setdefault(symbol, []).append(atom)
    for atoms in groups.values():
        number_of = {name: number for atom in reversed(atoms) for name, number in places[atom].items()}
        if len(atoms) > 1 and outputs <= number_of.keys() and not _meet(axis_map, atoms):
            rows = BatchAxes(tuple(atoms), number_of)
            return rows if _has_all(graph, rows) else None
    return None


def _has_all(graph: Graph, rows: BatchAxes) -> bool:
    """Whether each input has these rows on the one axis with their symbol, if it has that, also if no node reads it.

    Otherwise it would be whole beside divided ones: it has as many rows, which a rank may take from its shape, but no
    node was seen to relate them.
    """
    symbols = _symbols(graph, rows.axes)
    return not any(
        isinstance(size, ir.SymbolicDim) and size.value in symbols and number != rows.axes.get(value.name or "")
        for value in graph.graph.inputs
        for number, size in enumerate(value.shape or ())
    )


def _outputs(graph: Graph) -> list[str]:
    """The names of the outputs, without those computed from weights alone: they have no rows."""
    return [value.name or "" for value in graph.outputs if not graph.is_constant(value)]


def _symbols(graph: Graph, number_of: Mapping[str, int]) -> set[str]:
    """The symbols of these axes (by name) in the inputs' shapes."""
    shapes = [(value.shape, number_of[value.name or ""]) for value in graph.graph.inputs if value.name in number_of]
    sizes = [shape[number] for shape, number in shapes if shape is not None]
    return {size.value for size in sizes if isinstance(size, ir.SymbolicDim) and size.value}


def _meet(axis_map: AxisMap, atoms: Sequence[Factor]) -> bool:
    """Whether a node's inputs and outputs together have two of these factors."""
    return any(
        len({atom for axes in (*operation.inputs, *operation.outputs) for atom in ax.atoms_of(axes)} & {*atoms}) > 1
        for operation in axis_map.operations.values()
    )


def _places(graph: Graph, axis_map: AxisMap) -> Places:
    """For each factor of dynamic size, by name the inputs and outputs that have it alone on an axis, and that axis.

    Left out are factors that no input has, or only inputs that choose among computed values.
    """
    places: Places = {}
    for value in (*graph.graph.inputs, *graph.graph.outputs):
        # The declared number of axes may differ from the bound one, as of a Reshape to a list of dynamic length. Or an
        # output has no declared shape, and none can be inferred.
        axes = axis_map.axes.get(value) or ()
        sizes = value.shape if value.shape is not None else [None] * len(axes)
        for number, (axis, size) in enumerate(zip(axes, sizes, strict=False)):
            leaves = ax.leaves(axis)
            if len(leaves) == 1 and leaves[0].is_atom and not isinstance(size, int):
                places.setdefault(leaves[0], {}).setdefault(value.name or "", number)
    inputs = {value.name or "" for value in graph.graph.inputs if not _only_chooses(graph, value)}
    return {atom: number_of for atom, number_of in places.items() if not inputs.isdisjoint(number_of)}


def _only_chooses(graph: Graph, value: ir.Value) -> bool:
    """Whether an input has only indices of rows of computed values, such as of the tokens whose logits are computed."""
    tables = [node.inputs[t] for node, number in value.uses() for i, t in operator_of(node).lookups if i == number]
    computed = [table for table in tables if table and table.producer() and not graph.is_constant(table)]
    return len(computed) == len(value.uses()) > 0


def _mixed(axis_map: AxisMap) -> set[Factor]:
    """The factors that some node sums over, takes statistics of or compares pairs of, and those of weights."""
    operations = axis_map.operations.values()
    mixed = {atom for operation in operations for atom in (*_reduced(operation), *_paired(operation))}
    return mixed | axis_map.weight_atoms()


def _reduced(operation: Operation) -> Iterator[Factor]:
    """The factors that a node sums over, or takes statistics of."""
    yield from ax.atoms(operation.contracted)
    yield from ax.atoms(operation.reduced)


def _paired(operation: Operation) -> set[Factor]:
    """The factors that an output has twice: it has an element for each pair of them."""
    twice: set[Factor] = set()
    for axes in operation.outputs:
        seen: set[Factor] = set()
        for leaf in (leaf for axis in axes or () for leaf in ax.leaves(axis)):
            own = set(ax.atoms((leaf,)))
            twice |= seen & own
            seen |= own
    return twice


def explain_no_rows(graph: Graph, axis_map: AxisMap, made: Collection[ir.Node] = ()) -> str:
    """Why no axis is the batch: which node mixes rows along the axis that comes closest to being it.

    That is the axis that most outputs have, then most inputs; among equals the first one. The nodes in `made` compute
    from sizes alone, and their axes are not related.
    """
    outputs = _outputs(graph)
    places = _places(graph, axis_map)
    if not places:
        return "no input has an axis of dynamic size that stays one axis"
    best = max(places, key=lambda atom: (sum(name in places[atom] for name in outputs), len(places[atom])))
    named = next(f"axis {number} of '{name}'" for name, number in places[best].items())
    if (met := _where_met(axis_map, best)) is not None:
        return f"the rows along {named} are not independent: {met}"
    lacking = [name for name in outputs if name not in places[best]]
    if not lacking:
        return f"the rows along {named} are not independent: {_told_apart(axis_map, best, made)}"
    return f"the output '{lacking[0]}' has no axis for the rows along {named}"


def _where_met(axis_map: AxisMap, atom: Factor) -> str | None:
    """The first node that mixes the rows along a factor, and how; None if there is none."""
    pinned = atom.pinned
    if pinned is not None and pinned.node is not None:
        return f"{describe_node(pinned.node)}: {pinned.reason or 'it needs all of them at once'}"
    for node, operation in axis_map.operations.items():
        if not any(_has(axes, atom) for axes in operation.inputs):
            continue
        if atom in _reduced(operation):
            how = (
                "it sums over them" if atom in ax.atoms(operation.contracted) else "it needs statistics of all of them"
            )
            return f"{describe_node(node)}: {how}"
        if atom in _paired(operation):
            return f"{describe_node(node)}: its output has an element for each pair of them"
        for value, axes in operation.reads():
            if value.is_initializer() and _has(axes, atom):
                return f"{describe_node(node)}: its weight '{value.name}' has an entry for each of them"
        if pinned is not None and not operator_of(node).reads_shape and _loses(operation, atom):
            return f"{describe_node(node)}: {pinned.reason}"
    return None


def _told_apart(axis_map: AxisMap, atom: Factor, made: Collection[ir.Node]) -> str:
    """The first node that may treat rows differently, because it reads numbers that are computed from sizes."""
    for node, operation in axis_map.operations.items():
        numbers = (axes for value, axes in operation.reads() if value.producer() in made)
        if node not in made and any(_has(axes, atom) for axes in numbers):
            return f"{describe_node(node)}: it may treat rows differently, as it reads numbers computed from sizes"
    return "nodes compute values from sizes that may differ between rows"


def _has(axes: Axes, atom: Factor) -> bool:
    return atom in ax.atoms_of(axes)


def _loses(operation: Operation, atom: Factor) -> bool:
    """Whether a node reads a factor that no output has alone on an axis."""
    reads = any(_has(axes, atom) for axes in operation.inputs)
    gives = any(
        len(ax.leaves(axis)) == 1 and atom in ax.leaves(axis) for axes in operation.outputs for axis in axes or ()
    )
    return reads and not gives
