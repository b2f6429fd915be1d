"""Finds candidates: atoms that could be split, with the weights that they divide and the cost of their collectives."""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass

import onnx_ir as ir

from splitc.compiler.adapters.slots import is_slot_input
from splitc.compiler.analysis.facts import Analysis
from splitc.compiler.inference.shapes import fixed_size
from splitc.compiler.normal_form.graph import Graph
from splitc.compiler.operators import axes as ax
from splitc.compiler.operators.axes import Axis, Factor, Pin
from splitc.compiler.request.shapes import Shape
from splitc.compiler.sharding.axis_map import AxisMap
from splitc.compiler.sharding.crossings import crossings
from splitc.compiler.sharding.partial import find_sums
from splitc.runtime.units import format_bytes

# The latency of a collective, in bytes, which is added to those that it moves. A choice: by the devices' profiles it is
# 100 KB on GPUs and 300 KB on CPUs. With 16 or 256 KiB the plans of 42 of 43 models on three devices are the same.
SUM_BYTES = 64 << 10
# Minimum gain of an atom that is split, relative to that of all atoms together. Not relative to the best one: weights
# that are read for one token, where others are read for thousands, need all-reduces of hardly any bytes. A choice: with
# 1/64 or 1/16 the plans of 41 of 43 models are the same.
LEAST_GAIN_RATIO = 1 / 32
# Minimum bytes that splitting an embedding table saves on each rank: it saves memory only, since a run reads few rows.
# A choice: with 4 or 64 MiB the plans of 43 models are the same, but with 1 MiB not (their tables are small).
LOOKUP_BYTES = 16 << 20


@dataclass(frozen=True)
class Candidate:
    """An atom that divides weights.

    - `weights`: the weights, with the bytes of each that it divides.
    - `collectives`: the number of collectives in a run, if it is split.
    - `exchanged`: the bytes that they exchange, without outputs that the runtime joins: these cost no more than whole.
    """

    atom: Factor
    weights: Mapping[ir.Value, int]
    collectives: int
    exchanged: int

    @property
    def cost(self) -> int:
        """The cost of its collectives, in bytes: those exchanged, and a latency for each collective."""
        return max(1, self.collectives) * SUM_BYTES + self.exchanged

    @property
    def bytes(self) -> int:
        """The bytes of weights that would be split."""
        return sum(self.weights.values())

    @property
    def gain(self) -> float:
        """The bytes of weights that are split, for each byte of cost."""
        return self.bytes / self.cost


@dataclass(frozen=True)
class Candidates:
    """The candidates, the one of the highest gain first.

    - `order`: all atoms that divide weights, in the model's order.
    - `start`: by atom, the nodes that sum over it, or need a statistic of all its elements. Their results may need
      collectives if the atom is split.
    - `conflicts`: by candidate's atom, the atoms that can't be split together with it.
    """

    by_gain: tuple[Candidate, ...]
    order: tuple[Factor, ...]
    start: Mapping[Factor, list[ir.Node]]
    conflicts: Mapping[Factor, set[Factor]]


def find_candidates(analysis: Analysis, axis_map: AxisMap) -> Candidates:
    """All atoms that divide weights and that no node needs whole.

    Slots for adapters are sharded together with their layers, never alone.
    """
    graph, size = analysis.graph, analysis.costs.value_bytes
    _pin_ends(graph, axis_map, analysis.costs.shapes)
    _pin_borders(axis_map)
    _pin_tables(axis_map)
    weights, summing, reducing = reached_weights(axis_map, size), *_collecting(axis_map)
    start = {atom: [*summing.get(atom, ()), *reducing.get(atom, ())] for atom in weights}
    given = {atom for value in graph.graph.outputs for atom in ax.atoms_of(axis_map.axes[value])}
    joined = {atom for crossing in crossings(axis_map) for side in crossing.sides for atom in ax.atoms(side.before)}
    candidates = []
    for atom, covered in weights.items():
        # An atom that no output, sum or collective has is dropped by a Slice.
        is_used = atom in given or atom in summing or atom in joined
        divides = any(share for value, share in covered.items() if not is_slot_input(value))
        if is_used and atom.pinned is None and atom.size > 1 and divides:
            sums = find_sums(analysis, axis_map, {atom}, start[atom])
            candidates.append(Candidate(atom, covered, sums.count, sum(map(size, sums.exchanged))))
    # Among equals, candidates whose shards are joined come first: that is exact, and sums are rounded.
    candidates.sort(key=lambda candidate: (candidate.gain, candidate.bytes, candidate.atom in joined), reverse=True)
    conflicts = _conflicts(axis_map, {candidate.atom for candidate in candidates})
    return Candidates(tuple(candidates), tuple(weights), start, conflicts)


def _conflicts(axis_map: AxisMap, atoms: Collection[Factor]) -> dict[Factor, set[Factor]]:
    """For each atom, the atoms that can't be split together with it: some value has both, or some node sums over both.

    A rank would lack most of such a value or sum. Atoms in different sections of one axis do not conflict.
    """
    conflicts: dict[Factor, set[Factor]] = defaultdict(set)

    def visit(parts: list[Axis]) -> set[Factor]:
        groups = []
        for leaf in (leaf for part in parts for leaf in ax.leaves(part)):
            inside = (
                {leaf}.intersection(atoms)
                if leaf.is_atom
                else set[Factor]().union(*(visit([section]) for section in leaf.sections))
            )
            groups.append(inside)
        for one, other in itertools.combinations(groups, 2):
            for a, b in itertools.product(one, other):
                conflicts[a].add(b)
                conflicts[b].add(a)
        return set[Factor]().union(*groups)

    operations = axis_map.operations.values()
    summed = ((operation.contracted,) for operation in operations if len(operation.contracted) > 1)
    values = (axes for operation in operations for axes in (*operation.inputs, *operation.outputs) if axes)
    for axes in dict.fromkeys((*values, *summed)):
        visit(list(axes))
    return conflicts


def reject_costly(graph: Graph, candidates: Sequence[Candidate], axis_map: AxisMap, ranks: int) -> dict[Factor, str]:
    """The candidates whose collectives cost more than they save, or which save too little, with the reason."""
    looked_up = _looked_up(axis_map)
    only = looked_up - _read_without_lookup(graph, axis_map) if looked_up else set()
    summed = [candidate for candidate in candidates if candidate.collectives and candidate.atom not in looked_up]
    together = sum(candidate.bytes for candidate in summed) / max(1, sum(candidate.cost for candidate in summed))
    rejected: dict[Factor, str] = {}
    for candidate in candidates:
        if candidate.gain < LEAST_GAIN_RATIO * together:
            rejected[candidate.atom] = _why_costly(candidate.collectives)
        elif candidate.atom in only and candidate.bytes * (ranks - 1) / ranks < LOOKUP_BYTES:
            least = format_bytes(LOOKUP_BYTES)
            rejected[candidate.atom] = f"a shard of its embedding table would save a rank less than {least}"
    return rejected


def _why_costly(collectives: int) -> str:
    if collectives == 0:
        return "splitting it would save too little"
    count = "collective" if collectives == 1 else f"{collectives} collectives"
    return f"its {count} would cost more than it saves"


def _pin_ends(graph: Graph, axis_map: AxisMap, planned: Mapping[str, Shape]) -> None:
    """Pin sections of dynamic axes of inputs and outputs: the runtime slices and joins sections by fixed indices.

    Factors before such a section are pinned too, since their strides vary. The strides of those behind it do not.
    """
    for value in (*graph.graph.inputs, *graph.graph.outputs):
        sizes = planned.get(value.name or "", ())
        for number, axis in enumerate(axis_map.axes.get(value) or ()):
            fixed = None if value.shape is None else fixed_size(value.shape[number])
            if fixed is not None and number < len(sizes) and sizes[number] == ax.size_of(axis):
                continue
            leaves = ax.leaves(axis)
            ends = [place for place, leaf in enumerate(leaves, 1) if not leaf.is_atom]
            reason = f"it is a section of a dynamic axis of '{value.name}', or before one"
            ax.pin(tuple(leaves[: max(ends, default=0)]), Pin(None, reason))


def _pin_borders(axis_map: AxisMap) -> None:
    """Pin all but the first factor of axes at an island's border: ranks slice and join consecutive elements there."""
    for crossing in crossings(axis_map):
        for axis in (axis for side in crossing.sides for axis in (side.before, side.after)):
            leaves = ax.leaves(axis)
            rest = leaves[1:] if leaves and leaves[0].is_atom else leaves
            ax.pin(tuple(rest), Pin(crossing.node, "its shards, which a collective joins, would not be contiguous"))


def _pin_tables(axis_map: AxisMap) -> None:
    """Pin the rows of embedding tables unless they are one atom: a lookup in a shard needs consecutive rows."""
    for node, operation in axis_map.operations.items():
        leaves = ax.leaves(operation.contracted) if operation.is_lookup else []
        if len(leaves) > 1 or not all(leaf.is_atom for leaf in leaves):
            ax.pin(operation.contracted, Pin(node, "a rank would not have contiguous rows of its table"))


def reached_weights(axis_map: AxisMap, size: Callable[[ir.Value], int]) -> dict[Factor, dict[ir.Value, int]]:
    """For each atom, the weights that it divides, with the bytes of each that it divides."""
    reached: dict[Factor, dict[ir.Value, int]] = defaultdict(dict)
    for value, axes in axis_map.weight_uses():
        for axis in axes or ():
            shares: dict[Factor, float] = defaultdict(float)
            _add_shares(axis, 1.0, shares)
            for atom, share in shares.items():
                reached[atom][value] = int(share * size(value))
    return reached


def _add_shares(axis: Axis, share: float, shares: dict[Factor, float]) -> None:
    for leaf in ax.leaves(axis):
        if leaf.is_atom:
            shares[leaf] += share
        else:
            for section in leaf.sections:
                _add_shares(section, share * ax.size_of(section) / max(1, leaf.size), shares)


def _collecting(axis_map: AxisMap) -> tuple[dict[Factor, list[ir.Node]], dict[Factor, list[ir.Node]]]:
    """For each atom, the nodes that sum over it, and the nodes that need a statistic of all its elements."""
    summing: dict[Factor, list[ir.Node]] = defaultdict(list)
    reducing: dict[Factor, list[ir.Node]] = defaultdict(list)
    for node, operation in axis_map.operations.items():
        for collecting, axis in ((summing, operation.contracted), (reducing, operation.reduced)):
            for atom in dict.fromkeys(ax.atoms(axis)):
                collecting[atom].append(node)
    return summing, reducing


def _looked_up(axis_map: AxisMap) -> set[Factor]:
    """The atoms that are rows of lookup tables."""
    return {atom for op in axis_map.operations.values() if op.is_lookup for atom in ax.atoms(op.contracted)}


def _read_without_lookup(graph: Graph, axis_map: AxisMap) -> set[Factor]:
    """The atoms of values that nodes other than lookups read at run time."""
    return {
        atom
        for node, operation in axis_map.operations.items()
        if not operation.is_lookup and node not in graph.constant
        for axes in operation.inputs
        for atom in ax.atoms_of(axes)
    }
