"""Which atoms are split over the ranks: those that cover most weight bytes for the fewest and smallest sums."""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass

import onnx_ir as ir

from splitc.compiler.graph import Graph
from splitc.compiler.split import axes as ax
from splitc.compiler.split.axes import Axis, Factor, Pin
from splitc.compiler.split.axis_map import AxisMap
from splitc.compiler.split.partial import Sums, chosen_atoms, find_sums

# What a sum costs beside its bytes, in bytes: ranks wait for each other.
SUM_BYTES = 64 << 10
# An atom is split when it covers this share of the bytes that the best one does for what its sums cost.
WORTH = 1 / 32
# How much as worthy it must be as others to take their place for its covering more.
NEARLY = 0.6
# The share of the model's weight bytes that an atom must cover at least.
LEAST_SHARE = 1e-4
# A table of which a run reads a few rows is split when that spares each rank so many bytes: it saves no time.
LOOKUP_BYTES = 16 << 20


@dataclass(frozen=True)
class Candidate:
    """An atom that reaches weights: the bytes of each that it would split, its sums, and what these cost in bytes.

    Where nothing is summed, it is an output that is joined, which costs as much.
    """

    atom: Factor
    weights: Mapping[ir.Value, int]
    sums: int
    cost: int

    @property
    def bytes(self) -> int:
        """Bytes of weights that would be split."""
        return sum(self.weights.values())

    @property
    def worth(self) -> float:
        """Bytes covered for each byte that its sums cost."""
        return self.bytes / self.cost


@dataclass(frozen=True)
class Choice:
    """The atoms that are split, in the model's order; the candidates with the reason of those that are not; the sums.

    `partners` maps an atom with fewer elements than ranks (key-value heads) to another chosen with it (queries of a
    group), so that ranks that share an element divide what belongs to it.
    """

    chosen: tuple[Factor, ...]
    partners: Mapping[Factor, Factor]
    candidates: tuple[Candidate, ...]
    rejected: Mapping[Factor, str]
    sums: Sums


def choose(graph: Graph, axis_map: AxisMap, size: Callable[[ir.Value], int], ranks: int) -> Choice:
    """Choose the atoms to split. `size` gives the bytes of a value."""
    _pin_ends(graph, axis_map)
    weights = _reached(axis_map, size)
    contractions = _contractions(axis_map)
    given = {atom for value in graph.graph.outputs for axis in axis_map.axes[value] or () for atom in ax.atoms(axis)}
    whole = sum(size(value) for value in graph.graph.initializers.values())
    ranged = _ranged(axis_map)
    candidates = []
    rejected: dict[Factor, str] = {}
    for atom, covered in weights.items():
        is_used = atom in given or atom in contractions  # what is neither is cut off and thrown away
        if is_used and atom.pinned is None and atom.size > 1 and sum(covered.values()) > LEAST_SHARE * whole:
            sums = find_sums(
                axis_map, graph.position, {atom}, (*contractions.get(atom, ()), *ranged.get(atom, ())), size
            )
            joined = [value for value in graph.graph.outputs if chosen_atoms(axis_map.axes[value], {atom})]
            moved = sum(map(size, sums.summed or joined))
            candidates.append(Candidate(atom, covered, sums.count, max(1, sums.count) * SUM_BYTES + moved))
    candidates.sort(key=lambda each: (each.worth, each.bytes), reverse=True)
    conflicts = _conflicts(axis_map, {each.atom for each in candidates})
    looked_up = _looked_up(axis_map)
    best = max((each.worth for each in candidates if each.sums and each.atom not in looked_up), default=0.0)
    for each in candidates:
        if each.worth < WORTH * best:
            rejected[each.atom] = f"its {each.sums} sums cost more than they spare"
        elif _is_small_lookup(each, looked_up, axis_map, ranks):
            rejected[each.atom] = "it is only looked up in, and small"
    chosen = _select([each for each in candidates if each.atom not in rejected], conflicts, rejected)
    _drop_mixed(axis_map, chosen, rejected, ranks)
    partners = _find_partners(axis_map, chosen, candidates, contractions, ranks)
    order = {atom: number for number, atom in enumerate(weights)}
    atoms = tuple(sorted({*chosen, *partners.values()}, key=order.__getitem__))
    nodes = {node for atom in atoms for node in (*contractions.get(atom, ()), *ranged.get(atom, ()))}
    sums = find_sums(axis_map, graph.position, frozenset(atoms), nodes, size)
    return Choice(atoms, partners, tuple(candidates), rejected, sums)


def _select(
    candidates: Sequence[Candidate], conflicts: Mapping[Factor, set[Factor]], rejected: dict[Factor, str]
) -> dict[Factor, Candidate]:
    """Candidates of which no two conflict: greedily the worthiest first.

    Then one that was left out takes the place of those that it conflicts with, where it covers more bytes than they do
    together and its sums cost not much more for each.
    """
    chosen: dict[Factor, Candidate] = {}
    for candidate in (*candidates, *sorted(candidates, key=lambda each: -each.bytes), *candidates):
        if candidate.atom in chosen:
            continue
        rivals = [chosen[atom] for atom in conflicts[candidate.atom] if atom in chosen]
        held, cost = sum(each.bytes for each in rivals), sum(each.cost for each in rivals)
        if not rivals or (candidate.bytes > held and candidate.worth > NEARLY * held / cost):
            for rival in rivals:
                del chosen[rival.atom]
            chosen[candidate.atom] = candidate
    for candidate in candidates:
        sizes = [str(atom.size) for atom in conflicts[candidate.atom] if atom in chosen]
        if candidate.atom not in chosen:
            rejected[candidate.atom] = f"its weights are split along an axis of {' and '.join(sizes[:2])} instead"
    return chosen


def _pin_ends(graph: Graph, axis_map: AxisMap) -> None:
    """What goes in and out is cut and joined by the runtime, which knows of factors but not of sections."""
    for value in (*graph.graph.inputs, *graph.graph.outputs):
        for axis in axis_map.axes.get(value) or ():
            for leaf in ax.leaves(axis):
                if not leaf.is_atom:
                    ax.pin((leaf,), Pin(None, f"it is a part of an axis of '{value.name}'"))


def _reached(axis_map: AxisMap, size: Callable[[ir.Value], int]) -> dict[Factor, dict[ir.Value, int]]:
    """For each atom the weights that have it, with the bytes that it divides."""
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
    """For each atom the nodes that need the range of all its elements."""
    found: dict[Factor, list[ir.Node]] = defaultdict(list)
    for node, operation in axis_map.operations.items():
        for axis in (axis for axes in operation.inputs for axis in axes or () if operation.ranged):
            for atom in dict.fromkeys(ax.atoms(axis)):
                found[atom].append(node)
    return found


def _conflicts(axis_map: AxisMap, atoms: Collection[Factor]) -> dict[Factor, set[Factor]]:
    """For each atom the others that some value has together with it: split along both, a rank would lack most of it.

    Atoms in different sections of one axis go together well.
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

    seen: set[int] = set()
    for operation in axis_map.operations.values():
        for axes in (*operation.inputs, *operation.outputs):
            if axes is not None and id(axes) not in seen:
                seen.add(id(axes))
                visit(list(axes))
    return found


def _looked_up(axis_map: AxisMap) -> dict[Factor, set[ir.Value]]:
    """For each atom the tables whose rows it is."""
    found: dict[Factor, set[ir.Value]] = defaultdict(set)
    for node, operation in axis_map.operations.items():
        if operation.lookup is not None and node.inputs[0] is not None:
            for atom in ax.atoms(operation.contracted):
                found[atom].add(node.inputs[0])
    return found


def _is_small_lookup(
    candidate: Candidate, looked_up: Mapping[Factor, set[ir.Value]], axis_map: AxisMap, ranks: int
) -> bool:
    """Whether all that an atom splits is tables that nothing multiplies with, and small ones."""
    tables = looked_up.get(candidate.atom, set())
    read = (node for table in tables for node, _ in table.uses())
    only = all(axis_map.operations[node].lookup is not None for node in read if node in axis_map.operations)
    spared = candidate.bytes * (ranks - 1) / ranks
    return set(candidate.weights) <= tables and only and spared < LOOKUP_BYTES


def _drop_mixed(axis_map: AxisMap, chosen: dict[Factor, Candidate], rejected: dict[Factor, str], ranks: int) -> None:
    """Give up atoms that are summed over together with others that are not split: a rank would add those again."""
    again = True
    while again:
        again = False
        for operation in axis_map.operations.values():
            if not operation.contracted:
                continue
            for leaf in ax.leaves(operation.contracted):
                parts = [any(atom in chosen for atom in ax.atoms(section)) for section in leaf.sections]
                # A rank that has none of one part could not leave it out of the sum.
                few = any(atom.size < ranks for atom in ax.atoms((leaf,)) if atom in chosen)
                if any(parts) and (few or not all(parts)):
                    mixed = {atom for atom in ax.atoms((leaf,)) if atom in chosen}
                    for atom in mixed:
                        del chosen[atom]
                        rejected[atom] = "a part of what it is summed with can't be split"
                    again = True


def _find_partners(
    axis_map: AxisMap,
    chosen: Mapping[Factor, Candidate],
    candidates: Collection[Candidate],
    contractions: Mapping[Factor, list[ir.Node]],
    ranks: int,
) -> dict[Factor, Factor]:
    """For atoms with fewer elements than ranks, the one that divides most of the same weights and the same sums."""
    conflicts = _conflicts(axis_map, {each.atom for each in candidates})
    partners: dict[Factor, Factor] = {}
    for atom, candidate in chosen.items():
        if atom.size >= ranks:
            continue
        others = [
            each
            for each in candidates
            if each.atom in conflicts[atom]
            and set(contractions.get(each.atom, ())) == set(contractions.get(atom, ()))
            and set(each.weights) < set(candidate.weights)
            and not conflicts[each.atom] & (chosen.keys() - {atom})
        ]
        if others:
            partners[atom] = max(others, key=lambda each: each.bytes).atom
    return partners
