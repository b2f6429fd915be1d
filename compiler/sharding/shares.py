"""Divides the units of each sharded axis among ranks, by their shares."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

import onnx_ir as ir

from splitc.compiler.operators.axes import Factor

# Ranks get multiples of MULTIPLE units of an axis, or of a smaller power of two if there are fewer than STEPS multiples
# of that. Kernels of matrix products load 16 bytes at once, and elements have at least one byte. ONNX Runtime's Gelu in
# half precision leaves the last of an odd number of elements unset on a GPU (gelu_approximate_impl.cu). STEPS is a
# choice: shares are kept within 1 %.
MULTIPLE, STEPS = 16, 64


@dataclass(frozen=True)
class Range:
    """A rank's units of an axis, from `start` to before `stop`.

    With fewer units than ranks, surplus ranks replicate a neighbour's unit, and add zero to sums: their range is not
    `owned`. Or they divide the unit along another axis, their `partner`. Of a value without that axis, they have the
    same elements as an earlier rank.
    """

    start: int
    stop: int
    owned: bool = True
    partner: Factor | None = None

    @property
    def size(self) -> int:
        return self.stop - self.start

    def is_owned(self, present: Collection[Factor]) -> bool:
        """Whether no earlier rank has the same elements of a value with these atoms."""
        return self.owned and (self.partner is None or self.partner in present)


Ranges = dict[Factor, list[Range]]


def assign_units(
    weights: Mapping[Factor, Mapping[ir.Value, int]],
    shares: Sequence[Sequence[float]],
    home: Mapping[ir.Value, int] = MappingProxyType({}),
    partners: Mapping[Factor, Factor] = MappingProxyType({}),
) -> Ranges:
    """The ranges of each atom, one for each rank of a group.

    - `weights`: by atom, the bytes of the weights that it divides.
    - `shares`: one list for each group. An atom is divided by the shares of the first group that holds one of its
      weights.
    - `home`: that group, by weight (0 if absent).
    - `partners`: maps an atom with fewer units than ranks to the atom that is divided among ranks with the same unit.

    Each rank gets its share of the units, in multiples (`multiple_of`), rounded by the largest-remainder method.
    Rounding errors are carried over from atom to atom, in bytes, so that both the total and each part of the model keep
    to the shares.
    """
    groups = [[share / sum(group) for share in group] for group in shares]
    carried = [[0.0] * len(group) for group in groups]
    ranges: Ranges = {}
    for atom, divided in weights.items():
        group = min(home.get(weight, 0) for weight in divided)
        parts = groups[group]
        partner = partners.get(atom)
        if partner is not None:
            ranges[atom], ranges[partner] = divide_units(atom.size, partner.size, parts, partner)
            continue
        if atom in partners.values():
            continue  # it is divided with the atom that it is the partner of
        multiple = multiple_of(atom.size)
        steps = atom.size // multiple
        step = max(1.0, sum(divided.values()) / steps)
        counts = largest_remainder([steps * part for part in parts], steps, [c / step for c in carried[group]])
        carried[group] = [
            c + (steps * part - n) * step for c, part, n in zip(carried[group], parts, counts, strict=True)
        ]
        ranges[atom] = ranges_of([multiple * count for count in counts])
    return ranges


def multiple_of(units: int) -> int:
    """The power of two, up to MULTIPLE, of which ranks get multiples of an axis' units: 1 for few, or odd, units."""
    multiple = MULTIPLE
    while multiple > 1 and (units % multiple or units // multiple < STEPS):
        multiple //= 2
    return multiple


def largest_remainder(ideal: Sequence[float], total: int, owed: Sequence[float] | None = None) -> list[int]:
    """Integers that add up to `total`: the `ideal` numbers rounded down, or up where the remainder is largest.

    Remainders `owed` from earlier atoms are added to these.
    """
    counts = [int(number + 1e-9) for number in ideal]
    missing = [
        number - count + extra for number, count, extra in zip(ideal, counts, owed or [0.0] * len(counts), strict=True)
    ]
    for number in sorted(range(len(counts)), key=lambda n: -missing[n])[: total - sum(counts)]:
        counts[number] += 1
    return counts


def ranges_of(counts: Sequence[int]) -> list[Range]:
    """Consecutive ranges of these numbers of units. A range without units replicates a neighbour's unit."""
    ranges: list[Range] = []
    start = 0
    for count in counts:
        if count:
            ranges.append(Range(start, start + count))
        else:
            last = max(start, 1)
            ranges.append(Range(last - 1, last, owned=False))
        start += count
    return ranges


def divide_units(units: int, inner: int, parts: Sequence[float], partner: Factor) -> tuple[list[Range], list[Range]]:
    """Ranges for fewer units than ranks: consecutive ranks share a unit and divide the `inner` units of its partner."""
    outer_ranges: list[Range] = []
    inner_ranges: list[Range] = []
    first = 0
    for unit in range(units):
        most = len(parts) - (units - unit - 1)  # each later unit needs at least one rank
        end = first + 1
        while end < most and (unit == units - 1 or sum(parts[:end]) + parts[end] / 2 <= (unit + 1) / units):
            end += 1
        group = parts[first:end]
        counts = largest_remainder([inner * part / sum(group) for part in group], inner)
        inner_ranges += ranges_of(counts)
        outer_ranges += [Range(unit, unit + 1, partner=partner if later else None) for later in range(len(group))]
        first = end
    return outer_ranges, inner_ranges
