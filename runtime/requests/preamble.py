"""The preamble: masks, positions and lengths, which are computed before the ranks run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt

from splitc.runtime.arrays.array import Array
from splitc.runtime.arrays.ort_values import runner_on_arrays
from splitc.runtime.engines.built_here import newer_named
from splitc.runtime.engines.onnxruntime_cpu import ERRORS, failed, open_session
from splitc.runtime.feeds.on_gpu import Feed, on_host
from splitc.runtime.package.manifest import Manifest
from splitc.runtime.package.states import Length, Preamble
from splitc.runtime.requests.added_feeds import added, with_kept_rows, with_lengths

# What is added to a score that is to be hidden: this, or less. A choice: exporters write -10000, the least number of
# the type, or minus infinity, and the exponential of -10000 is zero in each type.
HIDING = -1e4
# Tokens whose masks are looked at together: what is compared stays in a processor's caches. A mask of 2,048 tokens
# takes some 20 ms so, and 170 as a whole, most of it for new pages.
BLOCK = 64


class PreambleEngine:
    """A package's preamble, run on the caller's thread. Raises PackageError if ONNX Runtime can't load it."""

    def __init__(self, package: Path, preamble: Preamble, lengths: Sequence[Length]) -> None:
        self._preamble, self._lengths = preamble, lengths
        self._whole = _Graph(package, preamble.file)
        self._plain = None if preamble.plain is None else _Graph(package, preamble.plain)

    def apply(self, feeds: Mapping[str, Feed], keeps_masks: bool = False) -> dict[str, Feed]:
        """The feeds with the preamble's outputs, and without the feeds that only the preamble reads.

        Masks are left out too if engines hide the same without them, unless it `keeps_masks`. Raises EngineError if the
        preamble fails.
        """
        consumed = {*self._preamble.consumed}
        if self._plain is not None and not keeps_masks and self._is_plain(feeds):
            outputs = self._plain.run(feeds)
        else:
            outputs = self._whole.run(feeds)
            if not keeps_masks and self._may_leave_out_masks(feeds, outputs):
                consumed.update([*self._preamble.masks, *self._preamble.blanks])
        return {name: feed for name, feed in {**feeds, **outputs}.items() if name not in consumed}

    def _may_leave_out_masks(self, feeds: Mapping[str, Feed], made: Mapping[str, Array]) -> bool:
        windows = self._preamble.windows
        masks = self._preamble.masks.items()
        if any(made[name].any() for name in self._preamble.blanks):
            return False
        return all(is_causal(made[name], feeds[length].shape[0], windows.get(name)) for name, length in masks)

    def _is_plain(self, feeds: Mapping[str, Feed]) -> bool:
        """Whether the plain graph applies, where it is known what masks hide: see `runtime.package.states.Preamble`."""
        rows, *others = {feeds[length.input].shape[0] + added(length, feeds) for length in self._lengths}
        ones = (feeds[name] for name in self._preamble.ones)
        batch = {feeds[name].shape[axis] for name, axis in self._preamble.batch.items()}
        if others or any({feeds[name].shape[0]} != batch for name in self._preamble.batched):
            return False
        return all(one.shape[-1] == rows and bool((on_host(one) == 1).all()) for one in ones)


def open_preamble(package: Path, manifest: Manifest) -> PreambleEngine | None:
    """A package's preamble, if it has one. Raises PackageError if ONNX Runtime can't load it."""
    if manifest.preamble is None:
        return None
    with newer_named(manifest):
        return PreambleEngine(package, manifest.preamble, manifest.lengths)


def rank_feeds(package: Path, manifest: Manifest, feeds: Mapping[str, Feed], keeps_masks: bool) -> dict[str, Array]:
    """What the ranks take for a request of its own, on the host: its feeds, and what the runtime adds.

    For `keeps_masks` and errors see `PreambleEngine.apply` and `with_lengths`.
    """
    taken = with_kept_rows(manifest.kept_rows, with_lengths(manifest.lengths, feeds))
    if (preamble := open_preamble(package, manifest)) is not None:
        taken = preamble.apply(taken, keeps_masks)
    return {name: on_host(feed) for name, feed in taken.items()}


class _Graph:
    """One graph of the preamble, as a session on the CPU."""

    def __init__(self, package: Path, file: str) -> None:
        self._file, session = file, open_session(package / file, 1)
        self._run = runner_on_arrays(session)
        self._inputs = [tensor.name for tensor in session.get_inputs()]
        self._outputs = [tensor.name for tensor in session.get_outputs()]

    def run(self, feeds: Mapping[str, Feed]) -> dict[str, Array]:
        """The graph's outputs for these feeds. Raises EngineError."""
        own = {name: np.asarray(on_host(feeds[name]), order="C") for name in self._inputs}
        try:
            made = self._run(self._outputs, own)
        except ERRORS as error:
            raise failed(self._file, str(error)) from error
        return dict(zip(self._outputs, made, strict=True))


def is_causal(mask: Array, before: int, window: int | None = None) -> bool:
    """Whether a mask hides later tokens from earlier ones, and nothing else.

    With a `window`, it must also hide all but the last `window` tokens, the token itself included. The mask is added to
    scores [..., tokens, rows], of which the first `before` rows are those of earlier requests. Later rows than this
    request's are not read.
    """
    tokens = mask.shape[-2]
    window = before + tokens if window is None else window
    step = min(BLOCK, window)
    for first in range(0, tokens, step):
        added = mask[..., first : first + step, : before + tokens]
        count, place = added.shape[-2], before + first
        # From these rows on, the first token sees, and all tokens.
        some, every = max(0, place + 1 - window), max(0, place + count - window)
        if not _is_zero(added[..., every : place + 1]):
            return False
        if not (_hides(added[..., :some]) and _hides(added[..., place + count :])):
            return False
        if count > 1:
            left = np.tri(count, count - 1, -1, np.bool_)[:, count - 1 - (every - some) :]
            right = ~np.tri(count, dtype=np.bool_)
            if not (_is_hidden(added[..., some:every], left) and _is_hidden(added[..., place : place + count], right)):
                return False
    return True


def _is_hidden(added: Array, where: npt.NDArray[np.bool_]) -> bool:
    """Whether the mask hides these elements, and no others."""
    return _is_zero(added[..., ~where]) and _hides(added[..., where])


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
