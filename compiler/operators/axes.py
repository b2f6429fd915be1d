"""Axes of values as products of factors, and which factors are the same.

Each axis of each value is a product of *factors*, major first, as in Shardy. Axes rules relate the factors of a node's
inputs and outputs (`splitc.compiler.operators`). Related factors are merged (union-find). A rule may refine a factor
into a product (a Reshape from 256 to 8 x 32) or into consecutive *sections* (a Split into q, k and v). A factor that is
not refined is an *atom*: heads, head size, width of the feed-forward layer. A *pin* is a node that needs an atom whole.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import onnx_ir as ir


@dataclass(frozen=True)
class Pin:
    """The node that needs an axis whole (None if it is no single node), and the reason."""

    node: ir.Node | None
    reason: str


@dataclass(eq=False)
class Factor:
    """A factor of an axis. At most one of these is set: `same` (what it was merged into), `product`, `sections`."""

    size: int
    same: Factor | None = None
    product: tuple[Factor, ...] = ()
    sections: tuple[Axis, ...] = ()
    pinned: Pin | None = None

    @property
    def is_atom(self) -> bool:
        """Whether the factor is refined neither into a product nor into sections."""
        return not self.product and not self.sections


# Factors, major first; none for an axis of size 1.
Axis = tuple[Factor, ...]

MISMATCH = Pin(None, "its sections have different sizes")
UNKNOWN = Pin(None, "it is related to an axis whose size depends on data")


def new_axis(size: int) -> Axis:
    """A new axis, unrelated to any other."""
    return (Factor(size),) if size != 1 else ()


def unknown_axis() -> Axis:
    """An axis whose size depends on data. It counts as 1, but related axes may have any size."""
    return (Factor(1, pinned=UNKNOWN),)


def is_unknown(axis: Axis) -> bool:
    """Whether the size of an axis depends on data."""
    return any(factor.pinned is UNKNOWN for factor in axis)


def size_of(axis: Axis) -> int:
    """The number of elements along an axis."""
    return math.prod(factor.size for factor in axis)


def find(factor: Factor) -> Factor:
    """The factor that this one has been merged into; itself if it was not merged."""
    while factor.same is not None:
        if factor.same.same is not None:
            factor.same = factor.same.same
        factor = factor.same
    return factor


def leaves(axis: Axis) -> list[Factor]:
    """The axis as a product of atoms and of factors with sections, without factors of size 1."""
    result: list[Factor] = []
    for factor in map(find, axis):
        result += leaves(factor.product) if factor.product else [factor] if factor.size != 1 else []
    return result


def atoms(axis: Axis) -> Iterator[Factor]:
    """All atoms of an axis, including those in sections. An atom may occur several times."""
    left = leaves(axis)[::-1]
    while left:
        leaf = left.pop()
        if leaf.is_atom:
            yield leaf
        for section in leaf.sections[::-1]:
            left += leaves(section)[::-1]


def atoms_of(axes: Iterable[Axis] | None) -> Iterator[Factor]:
    """All atoms of a value's axes; none if these are not known."""
    return (atom for axis in axes or () for atom in atoms(axis))


def product(axes: Iterable[Axis]) -> Axis:
    """Several axes as one, major first, as a Reshape merges them."""
    return tuple(factor for axis in axes for factor in axis)


def joined(*sections: Axis) -> Axis:
    """The axis of sections one after the other."""
    present = tuple(section for section in sections if size_of(section))
    return (Factor(sum(map(size_of, present)), sections=present),)


def flatten_sections(axis: Axis) -> None:
    """Replace sections of sections by a flat list, in place. Axes must not be related afterwards.

    Hundreds of Concats in sequence, each with the last one's result, nest sections as deeply.
    """
    left = [leaf for leaf in leaves(axis) if not leaf.is_atom]
    while left:
        leaf = left.pop()
        flat: list[Axis] = []
        sections = list(leaf.sections[::-1])
        while sections:
            parts = leaves(sections.pop())
            if len(parts) == 1 and not parts[0].is_atom:
                sections += parts[0].sections[::-1]
            else:
                flat.append(tuple(parts))
                left += [part for part in parts if not part.is_atom]
        leaf.sections = tuple(flat)


def pin(axis: Axis, reason: Pin) -> None:
    """Pin all atoms of the axis. An atom that is pinned already keeps its reason."""
    for atom in atoms(axis):
        atom.pinned = atom.pinned or reason


def relate(first: Axis, second: Axis) -> None:
    """Merge two axes, refining either where the other is finer. If no common refinement exists, both are pinned."""
    a, b = leaves(first)[::-1], leaves(second)[::-1]
    while a and b:
        x, y = find(a.pop()), find(b.pop())
        if x.product or y.product:  # an earlier pair refined it
            a += leaves((x,))[::-1]
            b += leaves((y,))[::-1]
        elif x is y:
            continue
        elif x.size == y.size:
            _merge(x, y)
        else:
            large, small = (x, y) if x.size > y.size else (y, x)
            if small.size == 0 or large.size % small.size or not _refine(large, small.size):
                _pin_all([*a, *b, x, y])
                return
            a.append(x)
            b.append(y)
    _pin_all([*a, *b])


def _pin_all(factors: Sequence[Factor]) -> None:
    pin(tuple(factors), MISMATCH)


def _merge(x: Factor, y: Factor) -> None:
    """Merge two factors of equal size."""
    if x.is_atom:
        x, y = y, x
    if y.is_atom:
        y.same = x
        if y.pinned is not None:
            pin((x,), y.pinned)
            y.pinned = None
        return
    mine, theirs = x.sections, y.sections
    y.sections, y.same = (), x
    _relate_sections(mine, theirs)


def _refine(factor: Factor, major: int) -> bool:
    """Refine a factor into a product whose first factor has size `major`. False if its sections do not allow it."""
    minor = factor.size // major
    if factor.is_atom:
        factor.product = (Factor(major, pinned=factor.pinned), Factor(minor, pinned=factor.pinned))
        factor.pinned = None
        return True
    sections = factor.sections
    if any(size_of(section) % minor for section in sections):
        return False
    # Each section is a whole number of rows of the minor factor, so the sections move to the major factor.
    row = Factor(minor)
    rows = tuple(new_axis(size_of(section) // minor) for section in sections)
    factor.sections, factor.product = (), (Factor(major, sections=rows), row)
    for section, count in zip(sections, rows, strict=True):
        relate(section, (*count, row))
    return True


def _relate_sections(first: Sequence[Axis], second: Sequence[Axis]) -> None:
    """Relate two divisions of one axis into sections, pair by pair. The longer of a pair is cut to the shorter's size.

    A pair with the same atom at different offsets (a rolled axis) would be cut into single elements. It is pinned
    instead, with all sections after it.
    """
    a, b = deque(first), deque(second)
    while a and b:
        x, y = a.popleft(), b.popleft()
        excess = size_of(x) - size_of(y)
        if excess and not set(atoms(x)).isdisjoint(atoms(y)):
            _pin_all(product((x, y, *a, *b)))
            return
        if excess > 0:
            x, rest = cut(x, [size_of(y), excess])
            a.appendleft(rest)
        elif excess < 0:
            y, rest = cut(y, [size_of(x), -excess])
            b.appendleft(rest)
        relate(x, y)


def cut(axis: Axis, sizes: Sequence[int]) -> list[Axis]:
    """Refine the axis into sections of these sizes, and return them.

    An axis that would have to be cut within a minor factor is pinned instead, with the sections.
    """
    parts = leaves(axis)
    if len([size for size in sizes if size]) <= 1:
        return [axis if size else (Factor(0),) for size in sizes]
    # Minor factors are not cut as long as each section is a multiple of them.
    minor: list[Factor] = []
    while len(parts) > 1 and all(size % (size_of((*minor, parts[-1]))) == 0 for size in sizes):
        minor.insert(0, parts.pop())
    rows = [size // size_of(tuple(minor)) for size in sizes]
    counts = [new_axis(row) for row in rows]
    kept = tuple(count for row, count in zip(rows, counts, strict=True) if row)
    if len(parts) == 1 and parts[0].is_atom:
        factor = parts[0]
        factor.sections = kept
        if factor.pinned is not None:
            reason, factor.pinned = factor.pinned, None
            pin((factor,), reason)
    elif len(parts) == 1:
        _relate_sections(parts[0].sections, kept)
    else:
        _pin_all([*parts, *product(counts)])
    return [(*count, *minor) for count in counts]
