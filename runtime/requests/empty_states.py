"""The states before the first request: zeros, and caches of length 0."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from splitc.runtime.arrays.array import Array, Zeros, number_type
from splitc.runtime.feeds.on_gpu import Feed
from splitc.runtime.package.manifest import Manifest, Tensor
from splitc.runtime.package.states import State


def empty_states(
    manifest: Manifest, feeds: Mapping[str, Feed], room: Mapping[str, int] | None = None
) -> dict[str, Zeros]:
    """Zeros for each state, by its input. Sizes of symbols are those in the feeds.

    A state that grows has as many tokens as `room` gives it, or none. Feeds that are not inputs of the package are
    ignored.
    """
    inputs = {tensor.name: tensor for tensor in (*manifest.inputs, *manifest.overridable)}
    sizes = {
        symbol: length
        for name, array in feeds.items()
        if name in inputs
        for symbol, length in zip(inputs[name].shape or (), array.shape, strict=False)
        if isinstance(symbol, str)
    }
    rows = count_batch(manifest, feeds)
    return {
        state.input: _zeros(state, inputs[state.input], sizes, rows, (room or {}).get(state.input, 0))
        for state in manifest.states
    }


def unfed_states(manifest: Manifest, feeds: Mapping[str, Feed]) -> dict[str, Array]:
    """The initial states, if no state is fed."""
    if not {state.input for state in manifest.states}.isdisjoint(feeds):
        return {}
    begun = empty_states(manifest, feeds)
    return {name: np.zeros(zeros.shape, number_type(zeros.dtype)) for name, zeros in begun.items()}


def count_batch(manifest: Manifest, feeds: Mapping[str, Feed]) -> int:
    """The number of rows of a request. Optional inputs have none: weights, and the tokens whose logits are computed."""
    known = [feeds[name].shape[axis] for name, axis in (manifest.batch or {}).items() if name in feeds]
    return max(known or _first_sizes(manifest, feeds), default=1)


def _first_sizes(manifest: Manifest, feeds: Mapping[str, Feed]) -> list[int]:
    """The sizes that may be the number of rows, in a model whose rows depend on each other.

    States have a row for each, so a symbol of their first axis is the number, if feeds have it. Else it is the first
    axis of the feeds, without those of one axis if others have more: theirs may be tokens.
    """
    given = [(tensor.shape or (), feeds[tensor.name].shape) for tensor in manifest.inputs if tensor.name in feeds]
    states = {state.input for state in manifest.states if state.grows != 0}
    firsts = {tensor.shape[0] for tensor in manifest.inputs if tensor.name in states and tensor.shape}
    symbols = {size for size in firsts if isinstance(size, str)}
    named = [size for shape, sizes in given for symbol, size in zip(shape, sizes, strict=False) if symbol in symbols]
    longer = [sizes[0] for _, sizes in given if len(sizes) > 1]
    return named or longer or [sizes[0] for _, sizes in given if sizes]


def _zeros(state: State, tensor: Tensor, sizes: Mapping[str, int], rows: int, room: int) -> Zeros:
    """A state before the first run. A symbol has its size in the feeds; any other first axis is the batch."""
    shape = []
    for axis, size in enumerate([None] * len(tensor.sample_shape or ()) if tensor.shape is None else tensor.shape):
        if axis == state.grows:
            shape.append(room)
        elif isinstance(size, int):
            shape.append(size)
        elif size is not None and size in sizes:
            shape.append(sizes[size])
        else:
            planned = tensor.sample_shape[axis] if tensor.sample_shape else 1
            shape.append(rows if axis == 0 else planned)
    return Zeros(tuple(shape), tensor.dtype)
