"""Shards are cut out of inputs, and outputs are joined from shards."""

from __future__ import annotations

import numpy as np
import pytest

from splitc.runtime.errors import PackageError
from splitc.runtime.package.manifest import AxisPart, Part
from splitc.runtime.package.parts import cut_part, join_parts

WHOLE = np.arange(2 * 12 * 5).reshape(2, 12, 5)


def part(*axes: AxisPart) -> Part:
    return Part("x", list(axes))


def test_part_of_an_inner_factor() -> None:
    """An axis of 3 x 4 whose second factor is cut."""
    axis = AxisPart(1, [1, 3, 4], [None, None, (1, 3)])
    assert cut_part(WHOLE, part(axis)).tolist() == WHOLE.reshape(2, 3, 4, 5)[:, :, 1:3].reshape(2, 6, 5).tolist()


def test_factor_before_that_is_of_any_size() -> None:
    """Batch and heads in one axis: the batch is inferred."""
    axis = AxisPart(1, [-1, 4], [None, (0, 1)])
    assert cut_part(WHOLE, part(axis)).tolist() == WHOLE.reshape(2, 3, 4, 5)[:, :, :1].reshape(2, 3, 5).tolist()
    assert cut_part(WHOLE[:, :8], part(axis)).shape == (2, 2, 5)


def test_parts_join_to_the_whole() -> None:
    parts = [part(AxisPart(1, [-1, 4], [None, places])) for places in ((0, 1), (1, 3), (2, 4))]
    joined = join_parts([(each, cut_part(WHOLE, each)) for each in parts])
    np.testing.assert_array_equal(joined, WHOLE)


def test_parts_along_two_factors() -> None:
    corners = [((a, a + 1), (b, b + 2)) for a in (0, 1, 2) for b in (0, 2)]
    parts = [part(AxisPart(1, [1, 3, 4], [None, first, second])) for first, second in corners]
    joined = join_parts([(each, cut_part(WHOLE, each)) for each in parts])
    np.testing.assert_array_equal(joined, WHOLE)


def test_parts_along_two_axes() -> None:
    parts = [part(AxisPart(0, [1, 2], [None, (n, n + 1)]), AxisPart(2, [1, 5], [None, (0, 5)])) for n in (0, 1)]
    np.testing.assert_array_equal(join_parts([(each, cut_part(WHOLE, each)) for each in parts]), WHOLE)


def test_parts_of_several_runs() -> None:
    """Along two axes, one of them a product."""
    middle, last = ([(0, 2), (10, 12)], [(1, 11)]), ([(0, 1), (4, 5)], [(1, 4)])
    parts = [
        part(AxisPart(1, [12], [None], a), AxisPart(2, [5], [None], b), AxisPart(0, [1, 2], [None, places]))
        for a in middle
        for b in last
        for places in ((0, 1), (1, 2))
    ]
    assert cut_part(WHOLE, parts[0]).tolist() == WHOLE[:1, [0, 1, 10, 11]][:, :, [0, 4]].tolist()
    np.testing.assert_array_equal(join_parts([(each, cut_part(WHOLE, each)) for each in parts]), WHOLE)
    with pytest.raises(PackageError, match="can't be sharded as the package shards 'x'"):
        cut_part(WHOLE[:, :11], parts[0])
