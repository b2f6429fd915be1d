"""What is computed before the ranks: masks, positions and lengths, of what grows with each token."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from splitc.runtime.arrays.array import Array
from splitc.runtime.engines.onnxruntime_cpu import ERRORS, failed, open_session
from splitc.runtime.feeds.on_gpu import Feed, on_host
from splitc.runtime.package.states import Length, Preamble
from splitc.runtime.requests.lengths import added

# What is added to a score that is to be hidden: this, or less. A choice: exporters write -10000, the least number of
# the type, or minus infinity, and the exponential of -10000 is zero in each type.
HIDING = -1e4
# Tokens whose masks are looked at together: what is compared stays in a processor's caches. A mask of 2,048 tokens
# takes some 20 ms so, and 170 as a whole, most of it for new pages.
BLOCK = 64


class PreambleEngine:
    """A package's preamble, on a thread of the caller's. Raises PackageError if ONNX Runtime can't load it."""

    def __init__(self, package: Path, preamble: Preamble, lengths: Sequence[Length]) -> None:
        self._preamble, self._lengths = preamble, lengths
        self._whole = _Graph(package, preamble.file)
        self._plain = None if preamble.plain is None else _Graph(package, preamble.plain)

    def apply(self, feeds: Mapping[str, Feed], keeps_masks: bool = False) -> dict[str, Feed]:
        """The feeds with what the preamble makes of them, and without those that it alone reads.

        Masks are left out too, if all hide nothing but later tokens, unless it `keeps_masks`. Raises EngineError if it
        fails on them.
        """
        consumed = {*self._preamble.consumed}
        if self._plain is not None and not keeps_masks and self._is_plain(feeds):
            outputs = self._plain.run(feeds)
        else:
            outputs = self._whole.run(feeds)
            masks = self._preamble.masks.items()
            if not keeps_masks and all(is_causal(outputs[name], feeds[length].shape[0]) for name, length in masks):
                consumed.update(self._preamble.masks)
        return {name: feed for name, feed in {**feeds, **outputs}.items() if name not in consumed}

    def _is_plain(self, feeds: Mapping[str, Feed]) -> bool:
        """Whether masks are known to hide nothing but later tokens: see `runtime.package.states.Preamble`."""
        (rows,) = {feeds[length.input].shape[0] + added(length, feeds) for length in self._lengths}
        ones = (feeds[name] for name in self._preamble.ones)
        return all(one.shape[-1] == rows and bool((on_host(one) == 1).all()) for one in ones)


class _Graph:
    """One of its graphs, as a session on the CPU."""

    def __init__(self, package: Path, file: str) -> None:
        self._file, self._session = file, open_session(package / file, 1)
        self._inputs = [tensor.name for tensor in self._session.get_inputs()]
        self._outputs = [tensor.name for tensor in self._session.get_outputs()]

    def run(self, feeds: Mapping[str, Feed]) -> dict[str, Array]:
        """What it makes of feeds. Raises EngineError."""
        own = {name: np.ascontiguousarray(on_host(feeds[name])) for name in self._inputs}
        try:
            made: list[Array] = self._session.run(self._outputs, own)
        except ERRORS as error:
            raise failed(self._file, str(error)) from error
        return dict(zip(self._outputs, made, strict=True))


def is_causal(mask: Array, before: int) -> bool:
    """Whether a mask hides later tokens from earlier ones, and nothing else.

    It is added to scores [..., tokens, rows], of which `before` are those of earlier requests. What is behind the rows
    of this request is not read.
    """
    tokens = mask.shape[-2]
    for first in range(0, tokens, BLOCK):
        added = mask[..., first : first + BLOCK, : before + tokens]
        count, place = added.shape[-2], before + first
        if not (_is_zero(added[..., : place + 1]) and _hides(added[..., place + count :])):
            return False
        if count > 1:
            own, shown = added[..., place : place + count], np.tri(count, dtype=np.bool_)
            if not (_is_zero(own[..., shown]) and _hides(own[..., ~shown])):
                return False
    return True


def _is_zero(added: Array) -> bool:
    if added.dtype.itemsize == 2:  # numpy compares the bits of halves faster than halves
        return not (added.view(np.uint16) << 1).any()
    return not added.any()


def _hides(added: Array) -> bool:
    if not added.size:
        return True
    if added.dtype.itemsize == 2:  # numbers below zero grow with their bits, up to minus infinity
        bits = added.view(np.uint16)
        least, most = np.array([HIDING, -np.inf], added.dtype).view(np.uint16)
        return bool(bits.min() >= least and bits.max() <= most)
    return bool((added <= HIDING).all())
