"""Shards of arrays: cut a rank's shard out of an input, and join the ranks' shards of an output."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from itertools import accumulate, product

import numpy as np

from splitc.runtime.arrays.array import Array
from splitc.runtime.errors import PackageError
from splitc.runtime.package.manifest import AxisPart, Part
from splitc.runtime.units import format_shape


def cut_part(array: Array, part: Part) -> Array:
    """Cut a rank's shard out of a whole array. Raises PackageError if the array has no such shard."""
    shape = part_shape(array.shape, part)
    try:
        view = array.reshape(_factors(array.shape, part))
        blocks = list(_blocks(array.ndim, part))
        if len(blocks) == 1:
            return np.ascontiguousarray(view[blocks[0][0]]).reshape(shape)
        cut = np.empty(shape, array.dtype)
        for place, own in blocks:
            cut[own] = view[place].reshape(cut[own].shape)
        return cut
    except ValueError as error:
        raise PackageError(
            f"an array of shape {format_shape(array.shape)} can't be sharded as the package shards '{part.name}'"
        ) from error


def cut_places(array: Array, places: Mapping[int, Sequence[tuple[int, int]]]) -> Array:
    """Keep these runs of elements along each axis. Runs go from the first element to before the last."""
    for axis, runs in places.items():
        array = array.take(np.concatenate([np.arange(*run) for run in runs]), axis)
    return np.ascontiguousarray(array)


def part_shape(shape: Sequence[int], part: Part) -> tuple[int, ...]:
    """The shape of a shard, for an array of this shape."""
    sizes = list(shape)
    for axis in part.axes:
        sizes[axis.axis] = sizes[axis.axis] // _known(axis.sizes) * math.prod(_lengths(axis))
    return tuple(sizes)


def join_parts(parts: Sequence[tuple[Part, Array]]) -> Array:
    """Join shards to the whole array. Overlapping elements are equal. Raises PackageError if they do not fit."""
    first, array = parts[0]
    shape = list(array.shape)
    for axis in first.axes:
        shape[axis.axis] = shape[axis.axis] // math.prod(_lengths(axis)) * _known(axis.sizes)
    whole = np.empty(shape, array.dtype)
    try:
        for part, own in parts:
            view = whole.reshape(_factors(whole.shape, part))
            for place, inside in _blocks(whole.ndim, part):
                view[place] = own[inside].reshape(view[place].shape)
    except ValueError as error:
        shapes = ", ".join(format_shape(own.shape) for _, own in parts)
        raise PackageError(f"the ranks' shards of '{first.name}' do not fit together: {shapes}") from error
    return whole


def _lengths(axis: AxisPart) -> list[int]:
    """The shard's length along each factor, without a factor of dynamic size."""
    if axis.places:
        return [sum(end - start for start, end in axis.places)]
    return [
        size if places is None else places[1] - places[0]
        for size, places in zip(axis.sizes, axis.ranges, strict=True)
        if size != -1
    ]


def _known(sizes: Sequence[int]) -> int:
    return math.prod(size for size in sizes if size != -1)


def _factors(shape: Sequence[int], part: Part) -> list[int]:
    """The array's shape, with each sharded axis replaced by its factors."""
    cut = {axis.axis: axis for axis in part.axes}
    factors: list[int] = []
    for number, size in enumerate(shape):
        sizes = cut[number].sizes if number in cut else [-1]
        factors += [size // _known(sizes) if factor == -1 else factor for factor in sizes]
    return factors


def _blocks(rank: int, part: Part) -> Iterator[tuple[tuple[slice, ...], tuple[slice, ...]]]:
    """The blocks of a shard: their slices along the factors of the whole array, and along the shard's own axes.

    There is one block, except for axes of several sections, where each run of elements has its own.
    """
    cut = {axis.axis: axis for axis in part.axes}
    choices: list[list[tuple[list[slice], slice]]] = []
    for number in range(rank):
        runs = cut[number].places if number in cut else []
        ends = list(accumulate(end - start for start, end in runs))
        ranges = cut[number].ranges if number in cut else [None]
        all_of_it = ([slice(None) if part is None else slice(*part) for part in ranges], slice(None))
        each_run = [([slice(*run)], slice(end - run[1] + run[0], end)) for run, end in zip(runs, ends, strict=True)]
        choices.append(each_run or [all_of_it])
    for chosen in product(*choices):
        yield tuple(place for places, _ in chosen for place in places), tuple(own for _, own in chosen)
