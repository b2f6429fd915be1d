"""Atoms that could be split: the weights that they divide, and the cost of the sums that they need."""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace

import onnx_ir as ir

from splitc.compiler.frontend.graph import Graph
from splitc.compiler.operators import axes as ax
from splitc.compiler.operators.axes import Axis, Factor, Pin
from splitc.compiler.sharding.axis_map import AxisMap
from splitc.compiler.sharding.crossings import crossings
from splitc.compiler.sharding.partial import find_sums

# The fixed cost of a sum, in bytes, added to what it moves: ranks wait for each other.
SUM_BYTES = 64 << 10
# Minimum gain of an atom that is split, as a share of the gain of all together. Not of the best one's: a few weights
# that are read for one token, beside others that are read for thousands, need next to no sums.
LEAST_GAIN_RATIO = 1 / 32
# Minimum share of the model's weight bytes that a split atom covers.
LEAST_SHARE = 1e-4
# Minimum bytes saved on each rank for splitting a lookup table. A run reads few of its rows, so only memory is saved.
LOOKUP_BYTES = 16 << 20


@dataclass(frozen=True)
class Candidate:
    """An atom that divides weights: the bytes of each weight, the number of collectives, and what they exchange.

    If there are none, the model's outputs are joined.
    """

    atom: Factor
    weights: Mapping[ir.Value, int]
    collectives: int
    exchanged: int

    @property
    def cost(self) -> int:
        """What its collectives cost, in bytes."""
        return max(1, self.collectives) * SUM_BYTES + self.exchanged

    @property
    def bytes(self) -> int:
        """Bytes of weights that would be split."""
        return sum(self.weights.values())

    @property
    def gain(self) -> float:
        """Bytes of weights covered per byte that the sums cost."""
        return self.bytes / self.cost


@dataclass(frozen=True)
class Candidates:
    """The candidates by falling gain.

    `order` has all atoms that divide weights, in the model's order. `contractions` are the nodes that sum over each
    atom. `ranged` are the nodes that need the least and the greatest of all its elements. `conflicts` are, for each
    candidate's atom, those that some value has beside it.
    """

    candidates: tuple[Candidate, ...]
    order: tuple[Factor, ...]
    contractions: Mapping[Factor, list[ir.Node]]
    ranged: Mapping[Factor, list[ir.Node]]
    conflicts: Mapping[Factor, set[Factor]]

    def start(self, atom: Factor) -> list[ir.Node]:
        """The nodes whose results may need collectives if the atom is split."""
        return [*self.contractions.get(atom, ()), *self.ranged.get(atom, ())]


def find_candidates(graph: Graph, axis_map: AxisMap, size: Callable[[ir.Value], int]) -> Candidates:
    """All atoms that divide weights and that no node needs whole. `size` gives the bytes of a value."""
    _pin_ends(graph, axis_map)
    _pin_borders(axis_map)
    _pin_tables(axis_map)
    weights, contractions, ranged = reached_weights(axis_map, size), _contractions(axis_map), _ranged(axis_map)
    given: dict[Factor, list[ir.Value]] = defaultdict(list)  # the outputs that have each atom
    for value in graph.graph.outputs:
        for atom in dict.fromkeys(atom for axis in axis_map.axes[value] or () for atom in ax.atoms(axis)):
            given[atom].append(value)
    least = LEAST_SHARE * sum(size(value) for value in graph.graph.initializers.values())
    joined = {atom for each in crossings(axis_map) for side in each.sides for atom in ax.atoms(side.before)}
    found = Candidates((), tuple(weights), contractions, ranged, {})
    candidates = []
    for atom, covered in weights.items():
        # Otherwise its elements are dropped by a Slice.
        is_used = atom in given or atom in contractions or atom in joined
        if is_used and atom.pinned is None and atom.size > 1 and sum(covered.values()) > least:
            sums = find_sums(axis_map, graph.position, {atom}, found.start(atom), size)
            moved = sum(map(size, sums.exchanged or given.get(atom, ())))
            candidates.append(Candidate(atom, covered, sums.count, moved))
    # Shards that are joined are exact, where sums are rounded.
    candidates.sort(key=lambda each: (each.gain, each.bytes, each.atom in joined), reverse=True)
    return replace(
        found, candidates=tuple(candidates), conflicts=_conflicts(axis_map, {each.atom for each in candidates})
    )


def _conflicts(axis_map: AxisMap, atoms: Collection[Factor]) -> dict[Factor, set[Factor]]:
    """For each atom the atoms that some value has beside it, or that some node sums over besides it.

    Split along both, a rank would lack most of the value, or of the terms. Atoms in different sections of one axis do
    not conflict.
    """
    found: dict[Factor, set[Factor]] = defaultdict(set)

    def visit(parts: list[Axis]) -> set[Factor]:
        groups = []
        for leaf in (leaf for part in parts for leaf in ax.leaves(part)):
            inside = (
                {leaf}.intersection(atoms)
                if leaf.is_atom
                else set[Factor]().union(*(visit([each]) for each in leaf.sections))
            )
            groups.append(inside)
        for one, other in itertools.combinations(groups, 2):
            for a, b in itertools.product(one, other):
                found[a].add(b)
                found[b].add(a)
        return set[Factor]().union(*groups)

    operations = axis_map.operations.values()
    summed = ((each.contracted,) for each in operations if len(each.contracted) > 1)
    values = (axes for each in operations for axes in (*each.inputs, *each.outputs) if axes)
    for axes in dict.fromkeys((*values, *summed)):
        visit(list(axes))
    return found


def reject_costly(graph: Graph, candidates: Sequence[Candidate], axis_map: AxisMap, ranks: int) -> dict[Factor, str]:
    """The candidates that cost more than they save, with the reason."""
    looked_up = _looked_up(axis_map)
    only = looked_up - _read_without_lookup(graph, axis_map) if looked_up else set()
    summed = [each for each in candidates if each.collectives and each.atom not in looked_up]
    together = sum(each.bytes for each in summed) / max(1, sum(each.cost for each in summed))
    rejected: dict[Factor, str] = {}
    for each in candidates:
        if each.gain < LEAST_GAIN_RATIO * together:
            rejected[each.atom] = f"its {each.collectives} sums cost more than they spare"
        elif each.atom in only and each.bytes * (ranks - 1) / ranks < LOOKUP_BYTES:
            rejected[each.atom] = "it is only looked up in, and small"
    return rejected


def _pin_ends(graph: Graph, axis_map: AxisMap) -> None:
    """Pin the sections of inputs and outputs: the runtime cuts and joins these by factors, not by sections."""
    for value in (*graph.graph.inputs, *graph.graph.outputs):
        for axis in axis_map.axes.get(value) or ():
            for leaf in ax.leaves(axis):
                if not leaf.is_atom:
                    ax.pin((leaf,), Pin(None, f"it is a part of an axis of '{value.name}'"))


def _pin_borders(axis_map: AxisMap) -> None:
    """Pin all factors but the first of an axis that goes into an island or out of it: ranks cut and join runs."""
    for crossing in crossings(axis_map):
        for axis in (axis for side in crossing.sides for axis in (side.before, side.after)):
            leaves = ax.leaves(axis)
            rest = leaves[1:] if leaves and leaves[0].is_atom else leaves
            ax.pin(tuple(rest), Pin(crossing.node, "its shards are joined there, and would be no runs"))


def _pin_tables(axis_map: AxisMap) -> None:
    """Pin rows of tables that are not one atom: a rank's rows must be consecutive for a lookup."""
    for node, operation in axis_map.operations.items():
        leaves = ax.leaves(operation.contracted) if operation.is_lookup else []
        if len(leaves) > 1 or not all(leaf.is_atom for leaf in leaves):
            ax.pin(operation.contracted, Pin(node, "it is looked up in, and made of parts"))


def reached_weights(axis_map: AxisMap, size: Callable[[ir.Value], int]) -> dict[Factor, dict[ir.Value, int]]:
    """For each atom the weights that it divides, and how many of their bytes."""
    found: dict[Factor, dict[ir.Value, int]] = defaultdict(dict)
    for value, axes in axis_map.weight_uses():
        for axis in axes or ():
            shares: dict[Factor, float] = defaultdict(float)
            _add_shares(axis, 1.0, shares)
            for atom, share in shares.items():
                found[atom][value] = int(share * size(value))
    return found


def _add_shares(axis: Axis, share: float, shares: dict[Factor, float]) -> None:
    for leaf in ax.leaves(axis):
        if leaf.is_atom:
            shares[leaf] += share
        else:
            for section in leaf.sections:
                _add_shares(section, share * ax.size_of(section) / max(1, leaf.size), shares)


def _contractions(axis_map: AxisMap) -> dict[Factor, list[ir.Node]]:
    """For each atom the nodes that sum over it."""
    found: dict[Factor, list[ir.Node]] = defaultdict(list)
    for node, operation in axis_map.operations.items():
        for atom in dict.fromkeys(ax.atoms(operation.contracted)):
            found[atom].append(node)
    return found


def _ranged(axis_map: AxisMap) -> dict[Factor, list[ir.Node]]:
    """For each atom the nodes that need the least and the greatest of all its elements."""
    found: dict[Factor, list[ir.Node]] = defaultdict(list)
    for node, operation in axis_map.operations.items():
        for axis in (axis for axes in operation.inputs for axis in axes or () if operation.needs_range):
            for atom in dict.fromkeys(ax.atoms(axis)):
                found[atom].append(node)
    return found


def _looked_up(axis_map: AxisMap) -> set[Factor]:
    """The atoms that are rows of lookup tables."""
    return {atom for op in axis_map.operations.values() if op.is_lookup for atom in ax.atoms(op.contracted)}


def _read_without_lookup(graph: Graph, axis_map: AxisMap) -> set[Factor]:
    """The atoms that a node reads at run time without a lookup."""
    return {
        atom
        for node, operation in axis_map.operations.items()
        if not operation.is_lookup and node not in graph.constant
        for axes in operation.inputs
        for axis in axes or ()
        for atom in ax.atoms(axis)
    }
