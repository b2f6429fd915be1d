"""Which atoms are split over the ranks: those that cover the most weight bytes for the fewest and smallest sums."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import onnx_ir as ir

from splitc.compiler.frontend.graph import Graph
from splitc.compiler.frontend.reads import is_random
from splitc.compiler.operators import axes as ax
from splitc.compiler.operators.axes import Factor
from splitc.compiler.sharding.axis_map import AxisMap
from splitc.compiler.sharding.candidates import Candidate, Candidates, reject_costly
from splitc.compiler.sharding.partial import Sums, find_sums

# Minimum gain of a larger candidate, as a share of its rivals' gain, to displace them.
LEAST_DISPLACING_RATIO = 0.6
# Minimum bytes of candidates that an atom excludes, times its own, for all of them to displace it.
LEAST_EXCLUDED_RATIO = 2


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


def choose(graph: Graph, axis_map: AxisMap, found: Candidates, size: Callable[[ir.Value], int], ranks: int) -> Choice:
    """Choose the atoms to split over so many ranks, among all candidates. `size` gives the bytes of a value."""
    conflicts = found.conflicts
    rejected = reject_costly(graph, found.candidates, axis_map, ranks)
    for atom in (each.atom for each in found.candidates if each.atom in conflicts[each.atom]):
        rejected.setdefault(atom, "some value has it along two axes")
    chosen = _select([each for each in found.candidates if each.atom not in rejected], conflicts, rejected)
    _drop_mixed(axis_map, chosen, rejected)
    partners = _find_partners(chosen, found, conflicts, ranks)
    atoms = tuple(atom for atom in found.order if atom in chosen or atom in partners.values())
    start = {node for atom in atoms for node in found.start(atom)}
    drawn = [node for node in graph.nodes if is_random(node)] if atoms else []
    sums = find_sums(axis_map, graph.position, frozenset(atoms), start, size, drawn)
    return Choice(atoms, partners, found.candidates, rejected, sums)


def _select(
    candidates: Sequence[Candidate], conflicts: Mapping[Factor, set[Factor]], rejected: dict[Factor, str]
) -> dict[Factor, Candidate]:
    """Candidates that do not conflict, chosen greedily by falling gain.

    Afterwards a candidate that was left out displaces its rivals if it covers more bytes than all of them together and
    its gain is not much lower (LEAST_DISPLACING_RATIO). In the end candidates that do not conflict displace the one
    that excludes them if they cover far more bytes together (LEAST_EXCLUDED_RATIO): a batch that constant tables have
    excludes all other axes.
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
    for atom in list(chosen):
        rest = {other: each for other, each in chosen.items() if other is not atom}
        excluded = [each for each in candidates if atom in conflicts[each.atom]]
        least = LEAST_EXCLUDED_RATIO * chosen[atom].bytes
        if _bytes(excluded) > least:
            sets = (_compatible([first, *excluded], conflicts, rest) for first in excluded)
            most = max(sets, key=lambda each: _bytes(each.values()))
            if _bytes(most.values()) > least:
                chosen = {**rest, **most}
    for candidate in candidates:
        sizes = [str(atom.size) for atom in chosen if atom in conflicts[candidate.atom]]
        if candidate.atom not in chosen:
            rejected[candidate.atom] = f"its weights are split along an axis of {' and '.join(sizes[:2])} instead"
    return chosen


def _compatible(
    candidates: Sequence[Candidate], conflicts: Mapping[Factor, set[Factor]], chosen: Mapping[Factor, Candidate]
) -> dict[Factor, Candidate]:
    """The candidates, in order, that conflict with nothing chosen and with none before them."""
    found: dict[Factor, Candidate] = {}
    for each in candidates:
        if conflicts[each.atom].isdisjoint(chosen) and conflicts[each.atom].isdisjoint(found):
            found[each.atom] = each
    return found


def _bytes(candidates: Iterable[Candidate]) -> int:
    return sum(each.bytes for each in candidates)


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
