"""Chooses the atoms to split: those that divide the most bytes of weights for the fewest and smallest all-reduces."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from splitc.compiler.analysis.facts import Analysis
from splitc.compiler.graphs.reads import is_random
from splitc.compiler.operators import axes as ax
from splitc.compiler.operators.axes import Factor
from splitc.compiler.sharding.axis_map import AxisMap
from splitc.compiler.sharding.candidates import Candidate, Candidates, reject_costly
from splitc.compiler.sharding.partial import NO_SUMS, Sums, find_sums

# A larger candidate replaces chosen ones that conflict with it if its gain is at least this share of theirs. A choice,
# for models in which another axis divides a little more for many more all-reduces: with any from 0 to 0.6 the plans of
# 52 models on three devices are the same, with 0.9 those of 42 of 43.
LEAST_DISPLACING_RATIO = 0.6
# Candidates replace a chosen one that conflicts with all of them if they divide this many times its bytes. A choice:
# with 1 the plans of 51 of 52 models are the same, with 4 those of 43. Without the rule, a video transformer's differs.
LEAST_EXCLUDED_RATIO = 2


@dataclass(frozen=True)
class Choice:
    """The choice of atoms to split.

    - `chosen`: the atoms to split, in the model's order.
    - `partners`: maps an atom with fewer units than ranks (key-value heads) to one inside it (the query heads of a
      group). Ranks that hold the same unit divide the partner's units.
    - `candidates`: all candidates.
    - `rejected`: the atoms that are not split, each with the reason.
    - `sums`: where partial values are summed.
    """

    chosen: tuple[Factor, ...]
    partners: Mapping[Factor, Factor] = field(default_factory=dict)
    candidates: tuple[Candidate, ...] = ()
    rejected: Mapping[Factor, str] = field(default_factory=dict)
    sums: Sums = NO_SUMS


def choose(analysis: Analysis, axis_map: AxisMap, candidates: Candidates, ranks: int) -> Choice:
    """Choose the atoms to split over this number of ranks."""
    graph, conflicts = analysis.graph, candidates.conflicts
    rejected = reject_costly(graph, candidates.by_gain, axis_map, ranks)
    for atom in (candidate.atom for candidate in candidates.by_gain if candidate.atom in conflicts[candidate.atom]):
        rejected.setdefault(atom, "a value or a sum has this axis twice")
    left = [candidate for candidate in candidates.by_gain if candidate.atom not in rejected]
    chosen = _select(left, conflicts)
    while mixed := _drop_mixed(axis_map, chosen):
        rejected.update(dict.fromkeys(mixed, "a node sums over it together with a part that can't be split"))
        left = [candidate for candidate in left if candidate.atom not in mixed]
        chosen |= _compatible(left, conflicts, chosen)  # those that conflicted with the dropped ones
    for candidate in (candidate for candidate in left if candidate.atom not in chosen):
        sizes = [str(atom.size) for atom in chosen if atom in conflicts[candidate.atom]]
        rejected[candidate.atom] = f"its weights are split along an axis of {' and '.join(sizes[:2])} instead"
    partners = _find_partners(chosen, candidates, conflicts, ranks)
    atoms = tuple(atom for atom in candidates.order if atom in chosen or atom in partners.values())
    start = {node for atom in atoms for node in candidates.start[atom]}
    drawn = [node for node in graph.nodes if is_random(node)] if atoms else []
    early = () if analysis.gains is None else analysis.gains.rows
    sums = find_sums(analysis, axis_map, frozenset(atoms), start, drawn, early)
    return Choice(atoms, partners, candidates.by_gain, rejected, sums)


def _select(candidates: Sequence[Candidate], conflicts: Mapping[Factor, set[Factor]]) -> dict[Factor, Candidate]:
    """Candidates that do not conflict, chosen greedily, the highest gain first.

    Then each other candidate replaces those that it conflicts with, if it divides more bytes than they do together, at
    a gain that is not much lower (LEAST_DISPLACING_RATIO). Last, candidates replace one that conflicts with all of them
    if they divide far more bytes together (LEAST_EXCLUDED_RATIO): a batch axis of constant tables conflicts with all
    other axes.
    """
    chosen: dict[Factor, Candidate] = {}
    for candidate in (*candidates, *sorted(candidates, key=lambda candidate: -candidate.bytes), *candidates):
        if candidate.atom in chosen:
            continue
        rivals = [chosen[atom] for atom in conflicts[candidate.atom] if atom in chosen]
        held, cost = sum(rival.bytes for rival in rivals), sum(rival.cost for rival in rivals)
        if not rivals or (candidate.bytes > held and candidate.gain > LEAST_DISPLACING_RATIO * held / cost):
            for rival in rivals:
                del chosen[rival.atom]
            chosen[candidate.atom] = candidate
    for atom in list(chosen):
        rest = {other: candidate for other, candidate in chosen.items() if other is not atom}
        excluded = [other for other in candidates if atom in conflicts[other.atom]]
        least = LEAST_EXCLUDED_RATIO * chosen[atom].bytes
        if _bytes(excluded) > least:
            sets = (_compatible([first, *excluded], conflicts, rest) for first in excluded)
            most = max(sets, key=lambda compatible: _bytes(compatible.values()))
            if _bytes(most.values()) > least:
                chosen = {**rest, **most}
    return chosen


def _compatible(
    candidates: Sequence[Candidate], conflicts: Mapping[Factor, set[Factor]], chosen: Mapping[Factor, Candidate]
) -> dict[Factor, Candidate]:
    """The candidates, in order, that conflict neither with chosen ones nor with earlier ones."""
    compatible: dict[Factor, Candidate] = {}
    for candidate in candidates:
        if conflicts[candidate.atom].isdisjoint(chosen) and conflicts[candidate.atom].isdisjoint(compatible):
            compatible[candidate.atom] = candidate
    return compatible


def _bytes(candidates: Iterable[Candidate]) -> int:
    return sum(candidate.bytes for candidate in candidates)


def _drop_mixed(axis_map: AxisMap, chosen: dict[Factor, Candidate]) -> set[Factor]:
    """Drop atoms that a node sums over together with whole sections, which every rank would add. Returns them."""
    dropped: set[Factor] = set()
    again = True
    while again:
        again = False
        for operation in axis_map.operations.values():
            for leaf in (*ax.leaves(operation.contracted), *ax.leaves(operation.reduced)):
                parts = [any(atom in chosen for atom in ax.atoms(section)) for section in leaf.sections]
                if any(parts) and not all(parts):
                    mixed = {atom for atom in ax.atoms((leaf,)) if atom in chosen}
                    for atom in mixed:
                        del chosen[atom]
                    dropped |= mixed
                    again = True
    return dropped


def _find_partners(
    chosen: Mapping[Factor, Candidate], candidates: Candidates, conflicts: Mapping[Factor, set[Factor]], ranks: int
) -> dict[Factor, Factor]:
    """For each atom with fewer units than ranks, the atom that divides most bytes of the same weights and sums."""
    partners: dict[Factor, Factor] = {}
    for atom, candidate in chosen.items():
        if atom.size >= ranks:
            continue
        others = [
            other
            for other in candidates.by_gain
            if other.atom in conflicts[atom]
            and other.atom not in conflicts[other.atom]
            # In a sum over only one of both, a unit would count once for each rank that holds it.
            and set(candidates.start[other.atom]) == set(candidates.start[atom])
            and set(other.weights) < set(candidate.weights)
            and not conflicts[other.atom] & (chosen.keys() - {atom})
        ]
        if others:
            partners[atom] = max(others, key=lambda other: other.bytes).atom
    return partners
