"""Related factors are one, and each is refined as finely as any operator needs."""

from __future__ import annotations

import numpy as np
import pytest

from splitc.compiler.operators.axes import (
    Axis,
    Factor,
    Pin,
    atoms,
    cut,
    flatten_sections,
    leaves,
    new_axis,
    pin,
    relate,
    size_of,
)
from splitc.compiler.sharding.shards import Shards
from splitc.compiler.sharding.shares import Range


def sizes(axis: Axis) -> list[int]:
    return [leaf.size for leaf in leaves(axis)]


def test_reshape_refines_the_factor_everywhere() -> None:
    hidden, other = new_axis(256), new_axis(256)
    relate(hidden, other)
    heads, head = new_axis(8), new_axis(32)
    relate(hidden, (*heads, *head))
    assert sizes(other) == [8, 32]
    assert leaves(other) == leaves((*heads, *head))


def test_products_line_up_where_one_is_finer() -> None:
    queries, keys = (Factor(2), Factor(32)), (Factor(4), Factor(16))
    relate(queries, keys)
    assert sizes(queries) == sizes(keys) == [2, 2, 16]
    assert leaves(queries) == leaves(keys)


def test_products_that_do_not_line_up_are_pinned() -> None:
    first, second = (Factor(4), Factor(6)), (Factor(6), Factor(4))
    relate(first, second)
    assert all(atom.pinned for axis in (first, second) for atom in atoms(axis))


def test_pin_goes_to_all_that_is_the_same_and_to_what_it_is_refined_into() -> None:
    first, second = new_axis(12), new_axis(12)
    relate(first, second)
    pin(first, Pin(None, "norm"))
    relate(second, (Factor(3), Factor(4)))
    assert [atom.pinned for atom in atoms(first)] == [Pin(None, "norm")] * 2


def test_sections_that_are_cut_in_two_ways_are_cut_at_all_places() -> None:
    axis, other = new_axis(24), new_axis(24)
    cut(axis, [16, 8])
    cut(other, [8, 16])
    relate(axis, other)
    cut_sizes = [atom.size for atom in atoms(axis)]
    assert cut_sizes == [8, 8, 8]
    assert cut_sizes == [atom.size for atom in atoms(other)]


def test_rotated_halves_are_one() -> None:
    """Concat(-second, first) is added to the whole: both halves are the same axis."""
    head, turned = new_axis(16), new_axis(16)
    first, second = cut(head, [8, 8])
    a, b = cut(turned, [8, 8])
    relate(a, second)
    relate(b, first)
    relate(head, turned)
    assert leaves(first) == leaves(second)


@pytest.mark.parametrize(("length", "step"), [(1500, 1), (1500, 7), (12, 4)])
def test_axis_that_is_rolled_is_whole(length: int, step: int) -> None:
    """A Concat of the axis' end and its start is added to the axis: all elements are related to each other."""
    axis, rolled = new_axis(length), new_axis(length)
    start, end = cut(axis, [length - step, step])
    first, second = cut(rolled, [step, length - step])
    relate(first, end)
    relate(second, start)
    relate(axis, rolled)
    assert all(atom.pinned for whole in (axis, rolled) for atom in atoms(whole))


def test_heads_of_sections_are_found_after_they_were_cut() -> None:
    """q | k | v of heads x 4 each, where the head size is only related on the whole axis: [8 | 2 | 2] x 4."""
    axis = new_axis(48)
    cut(axis, [32, 8, 8])
    relate(axis, (Factor(12), Factor(4)))
    assert sizes(axis) == [12, 4]
    assert [atom.size for atom in atoms(axis)] == [8, 2, 2, 4]


def test_axis_that_grew_by_a_thousand_joins() -> None:
    """Each is a section of the next one, so a recursion would be as deep."""
    grown = new_axis(2)
    for _ in range(1000):
        joined = new_axis(size_of(grown) + 2)
        first, _ = cut(joined, [size_of(grown), 2])
        relate(first, grown)
        grown = joined
    assert len(list(atoms(grown))) == 1001
    flatten_sections(grown)
    ranges = {atom: Range(0, 1) for atom in atoms(grown)}
    assert Shards(ranges).size(grown) == 1001


def test_cut_of_a_product_keeps_the_minor_factor_whole() -> None:
    axis = (Factor(3), Factor(8), Factor(4))
    q, k, v = cut(axis, [32, 32, 32])
    assert leaves(q) == leaves(k) == leaves(v)
    assert sizes(q) == [8, 4]


@pytest.mark.parametrize("split", [0, 1])
def test_indices_of_a_part_are_those_of_the_whole(split: int) -> None:
    """A shard along either factor of a product, and inside sections, has the elements that numpy picks."""
    axis = (Factor(3), Factor(4))
    shards = Shards({axis[split]: Range(1, 3)})
    whole = np.arange(12).reshape(3, 4)
    assert shards.indices(axis).tolist() == (whole[1:3] if split == 0 else whole[:, 1:3]).ravel().tolist()
    assert shards.size(axis) == len(shards.indices(axis))
    fused = new_axis(20)
    first, second = cut(fused, [12, 8])
    relate(first, axis)
    inside = shards.indices(fused)
    assert inside.tolist() == [*shards.indices(axis).tolist(), *range(12, 20)]
    assert size_of(second) == 8
