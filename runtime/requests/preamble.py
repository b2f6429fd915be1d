"""What is computed before the ranks: masks, positions and lengths, of what grows with each token."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np

from splitc.runtime.arrays.array import Array
from splitc.runtime.engines.onnxruntime_cpu import ERRORS, failed, open_session
from splitc.runtime.feeds.on_gpu import Feed, on_host
from splitc.runtime.package.states import Preamble

# What is added to a score that is to be hidden: this, or less. A choice: exporters write -10000, the least number of
# the type, or minus infinity, and the exponential of -10000 is zero in each type.
HIDING = -1e4
# Tokens whose masks are looked at together: what is compared stays in a processor's caches. A mask of 2,048 tokens
# takes some 20 ms so, and 170 as a whole, most of it for new pages.
BLOCK = 64


class PreambleEngine:
    """A package's preamble, on a thread of the caller's. Raises PackageError if ONNX Runtime can't load it."""

    def __init__(self, package: Path, preamble: Preamble) -> None:
        self._preamble = preamble
        self._session = open_session(package / preamble.file, 1)

    def apply(self, feeds: Mapping[str, Feed], keeps_masks: bool = False) -> dict[str, Feed]:
        """The feeds with what the preamble makes of them, and without those that it alone reads.

        Masks are left out too, if all hide nothing but later tokens, unless it `keeps_masks`. Raises EngineError if it
        fails on them.
        """
        own = {name: np.ascontiguousarray(on_host(feeds[name])) for name in self._preamble.inputs}
        try:
            made: list[Array] = self._session.run(self._preamble.outputs, own)
        except ERRORS as error:
            raise failed(self._preamble.file, str(error)) from error
        consumed = {*self._preamble.consumed}
        outputs = dict(zip(self._preamble.outputs, made, strict=True))
        masks = self._preamble.masks
        if not keeps_masks and all(is_causal(outputs[name], feeds[length].shape[0]) for name, length in masks.items()):
            consumed.update(masks)
        return {name: feed for name, feed in {**feeds, **outputs}.items() if name not in consumed}


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
