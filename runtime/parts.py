"""Parts of arrays: what a rank takes of a model's input, and how the ranks' parts of an output make the whole."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import numpy as np

from splitc.runtime.arrays import Array
from splitc.runtime.manifest import AxisPart, Part


def cut_part(array: Array, part: Part) -> Array:
    """Cut a rank's part out of a whole array."""
    shape = part_shape(array.shape, part)
    return np.ascontiguousarray(array.reshape(_factors(array.shape, part))[_places(array.ndim, part)]).reshape(shape)


def cut_places(array: Array, places: Mapping[int, Sequence[tuple[int, int]]]) -> Array:
    """Keep these stretches of an array, one after the other.

    `places` has stretches by axis, each from its first element to before its last.
    """
    for axis, stretches in places.items():
        array = array.take(np.concatenate([np.arange(*each) for each in stretches]), axis)
    return np.ascontiguousarray(array)


def part_shape(shape: Sequence[int], part: Part) -> tuple[int, ...]:
    """The shape that the part of an array of this shape has."""
    sizes = list(shape)
    for axis in part.axes:
        sizes[axis.axis] = _part_size(axis, sizes[axis.axis])
    return tuple(sizes)


def join_parts(parts: Sequence[tuple[Part, Array]]) -> Array:
    """Join parts to the whole array. Where parts overlap, their elements are equal."""
    first, array = parts[0]
    shape = list(array.shape)
    for axis in first.axes:
        shape[axis.axis] = _whole_size(axis, shape[axis.axis])
    whole = np.empty(shape, array.dtype)
    for part, own in parts:
        view = whole.reshape(_factors(whole.shape, part))[_places(whole.ndim, part)]
        view[...] = own.reshape(view.shape)
    return whole


def _lengths(axis: AxisPart) -> list[int]:
    """The part's length along each factor but a first one of unknown size."""
    return [
        size if places is None else places[1] - places[0]
        for size, places in zip(axis.sizes, axis.ranges, strict=True)
        if size != -1
    ]


def _part_size(axis: AxisPart, whole: int) -> int:
    return whole // math.prod(size for size in axis.sizes if size != -1) * math.prod(_lengths(axis))


def _whole_size(axis: AxisPart, part: int) -> int:
    return part // math.prod(_lengths(axis)) * math.prod(size for size in axis.sizes if size != -1)


def _factors(shape: Sequence[int], part: Part) -> list[int]:
    """The array's shape with each axis that is cut as its factors."""
    cut = {axis.axis: axis for axis in part.axes}
    factors: list[int] = []
    for number, size in enumerate(shape):
        if number not in cut:
            factors.append(size)
            continue
        known = math.prod(each for each in cut[number].sizes if each != -1)
        factors += [size // known if each == -1 else each for each in cut[number].sizes]
    return factors


def _places(rank: int, part: Part) -> tuple[slice, ...]:
    cut = {axis.axis: axis for axis in part.axes}
    places: list[slice] = []
    for number in range(rank):
        ranges = cut[number].ranges if number in cut else [None]
        places += [slice(None) if each is None else slice(*each) for each in ranges]
    return tuple(places)
