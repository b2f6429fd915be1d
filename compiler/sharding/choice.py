"""Which atoms are split over the ranks: those that cover the most weight bytes for the fewest and smallest sums."""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass

import onnx_ir as ir

from splitc.compiler.frontend.graph import Graph
from splitc.compiler.operators import axes as ax
from splitc.compiler.operators.axes import Axis, Factor
from splitc.compiler.sharding.axis_map import AxisMap
from splitc.compiler.sharding.candidates import Candidate, Candidates, find_candidates
from splitc.compiler.sharding.partial import Sums, find_sums

# Minimum gain of a larger candidate, as a share of its rivals' gain, to displace them.
LEAST_DISPLACING_RATIO = 0.6


@dataclass(frozen=True)
class Choice:
    """The atoms that are split, in the model's order; all candidates; the reasons for rejected ones; the sums.

    `partners` maps an atom with fewer units than ranks (key-value heads) to another one inside it (the query heads of
    a group). Ranks that hold the same unit divide the partner's units.
    """

    chosen: tuple[Factor, ...]
    partners: Mapping[Factor, Factor]
    candidates: tuple[Candidate, ...]
    rejected: Mapping[Factor, str]
    sums: Sums


def choose(graph: Graph, axis_map: AxisMap, size: Callable[[ir.Value], int], ranks: int) -> Choice:
    """Choose the atoms to split. `size` gives the bytes of a value."""
    found = find_candidates(graph, axis_map, size, ranks)
    conflicts = _conflicts(axis_map, {each.atom for each in found.candidates})
    rejected = dict(found.rejected)
    for atom in (each.atom for each in found.candidates if each.atom in conflicts[each.atom]):
        rejected.setdefault(atom, "some value has it along two axes")
    chosen = _select([each for each in found.candidates if each.atom not in rejected], conflicts, rejected)
    _drop_mixed(axis_map, chosen, rejected)
    partners = _find_partners(chosen, found, conflicts, ranks)
    atoms = tuple(atom for atom in found.order if atom in chosen or atom in partners.values())
    start = {node for atom in atoms for node in found.start(atom)}
    sums = find_sums(axis_map, graph.position, frozenset(atoms), start, size)
    return Choice(atoms, partners, found.candidates, rejected, sums)


def _select(
    candidates: Sequence[Candidate], conflicts: Mapping[Factor, set[Factor]], rejected: dict[Factor, str]
) -> dict[Factor, Candidate]:
    """Candidates that do not conflict, chosen greedily by falling gain.

    Afterwards a candidate that was left out displaces its rivals if it covers more bytes than all of them together and
    its gain is not much lower (LEAST_DISPLACING_RATIO).
    """
    chosen: dict[Factor, Candidate] = {}
    for candidate in (*candidates, *sorted(candidates, key=lambda each: -each.bytes), *candidates):
        if candidate.atom in chosen:
            continue
        rivals = [chosen[atom] for atom in conflicts[candidate.atom] if atom in chosen]
        held, cost = sum(each.bytes for each in rivals), sum(each.cost for each in rivals)
        if not rivals or (candidate.bytes > held and candidate.gain > LEAST_DISPLACING_RATIO * held / cost):
            for rival in rivals:
                del chosen[rival.atom]
            chosen[candidate.atom] = candidate
    for candidate in candidates:
        sizes = [str(atom.size) for atom in chosen if atom in conflicts[candidate.atom]]
        if candidate.atom not in chosen:
            rejected[candidate.atom] = f"its weights are split along an axis of {' and '.join(sizes[:2])} instead"
    return chosen


def _conflicts(axis_map: AxisMap, atoms: Collection[Factor]) -> dict[Factor, set[Factor]]:
    """For each atom the atoms that some value has beside it. Split along both, a rank would lack most of the value.

    Atoms in different sections of one axis do not conflict.
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


def _drop_mixed(axis_map: AxisMap, chosen: dict[Factor, Candidate], rejected: dict[Factor, str]) -> None:
    """Reject atoms that are summed over together with unsplit ones: every rank would add the unsplit ones again."""
    again = True
    while again:
        again = False
        for operation in axis_map.operations.values():
            if not operation.contracted:
                continue
            for leaf in ax.leaves(operation.contracted):
                parts = [any(atom in chosen for atom in ax.atoms(section)) for section in leaf.sections]
                if any(parts) and not all(parts):
                    mixed = {atom for atom in ax.atoms((leaf,)) if atom in chosen}
                    for atom in mixed:
                        del chosen[atom]
                        rejected[atom] = "a part of what it is summed with can't be split"
                    again = True


def _find_partners(
    chosen: Mapping[Factor, Candidate], found: Candidates, conflicts: Mapping[Factor, set[Factor]], ranks: int
) -> dict[Factor, Factor]:
    """For each atom with fewer units than ranks, the atom that divides most bytes of the same weights and sums."""
    partners: dict[Factor, Factor] = {}
    for atom, candidate in chosen.items():
        if atom.size >= ranks:
            continue
        others = [
            each
            for each in found.candidates
            if each.atom in conflicts[atom]
            and each.atom not in conflicts[each.atom]
            and set(found.contractions.get(each.atom, ())) == set(found.contractions.get(atom, ()))
            and set(each.weights) < set(candidate.weights)
            and not conflicts[each.atom] & (chosen.keys() - {atom})
        ]
        if others:
            partners[atom] = max(others, key=lambda each: each.bytes).atom
    return partners
