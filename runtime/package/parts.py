"""Shards of arrays: cut a rank's shard out of an input, and join the ranks' shards of an output."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import numpy as np

from splitc.runtime.arrays.array import Array
from splitc.runtime.errors import PackageError
from splitc.runtime.package.manifest import AxisPart, Part
from splitc.runtime.units import format_shape


def cut_part(array: Array, part: Part) -> Array:
    """Cut a rank's shard out of a whole array. Raises PackageError for an array that has no such shard."""
    try:
        cut = array.reshape(_factors(array.shape, part))[_places(array.ndim, part)]
    except ValueError as error:
        raise PackageError(
            f"an array of shape {format_shape(array.shape)} can't be sharded as the package shards '{part.name}'"
        ) from error
    return np.ascontiguousarray(cut).reshape(part_shape(array.shape, part))


def cut_places(array: Array, places: Mapping[int, Sequence[tuple[int, int]]]) -> Array:
    """Keep these runs of an array along each axis. Runs go from the first element to before the last."""
    for axis, runs in places.items():
        array = array.take(np.concatenate([np.arange(*run) for run in runs]), axis)
    return np.ascontiguousarray(array)


def part_shape(shape: Sequence[int], part: Part) -> tuple[int, ...]:
    """The shape of a shard, for an array of this shape."""
    sizes = list(shape)
    for axis in part.axes:
        sizes[axis.axis] = sizes[axis.axis] // _known(axis) * math.prod(_lengths(axis))
    return tuple(sizes)


def join_parts(parts: Sequence[tuple[Part, Array]]) -> Array:
    """Join shards to the whole array. Overlapping elements are equal. Raises PackageError if they do not fit."""
    first, array = parts[0]
    shape = list(array.shape)
    for axis in first.axes:
        shape[axis.axis] = shape[axis.axis] // math.prod(_lengths(axis)) * _known(axis)
    whole = np.empty(shape, array.dtype)
    try:
        for part, own in parts:
            view = whole.reshape(_factors(whole.shape, part))[_places(whole.ndim, part)]
            view[...] = own.reshape(view.shape)
    except ValueError as error:
        shapes = ", ".join(format_shape(own.shape) for _, own in parts)
        raise PackageError(f"the ranks' shards of '{first.name}' do not fit together: {shapes}") from error
    return whole


def _lengths(axis: AxisPart) -> list[int]:
    """The shard's length along each factor, without a factor of dynamic size."""
    return [
        size if places is None else places[1] - places[0]
        for size, places in zip(axis.sizes, axis.ranges, strict=True)
        if size != -1
    ]


def _known(axis: AxisPart) -> int:
    return math.prod(size for size in axis.sizes if size != -1)


def _factors(shape: Sequence[int], part: Part) -> list[int]:
    """The array's shape, with each sharded axis replaced by its factors."""
    cut = {axis.axis: axis for axis in part.axes}
    factors: list[int] = []
    for number, size in enumerate(shape):
        if number not in cut:
            factors.append(size)
            continue
        known = math.prod(factor for factor in cut[number].sizes if factor != -1)
        factors += [size // known if factor == -1 else factor for factor in cut[number].sizes]
    return factors


def _places(rank: int, part: Part) -> tuple[slice, ...]:
    cut = {axis.axis: axis for axis in part.axes}
    places: list[slice] = []
    for number in range(rank):
        ranges = cut[number].ranges if number in cut else [None]
        places += [slice(None) if part is None else slice(*part) for part in ranges]
    return tuple(places)
