"""Finds plain requests: their masks are causal, perhaps with a sliding window, which is known without computing them.

In most requests the inputs that tell tokens from padding are all ones. Then masks depend on numbers of tokens alone, so
the compiler can compute some and look at them. Masks of prompts are large: computing one on the CPU takes as long as
some layers on a GPU.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import onnx_ir as ir

from splitc.compiler.caches.lengths import Filled
from splitc.compiler.graphs.alone import open_alone, with_own_tensors
from splitc.compiler.graphs.walks import reached
from splitc.compiler.inference.folding import fold_shapes
from splitc.compiler.operators.registry import operator_of
from splitc.compiler.patterns.sizes import Axis, Size, Sizes
from splitc.runtime.arrays.ort_values import run_on_arrays
from splitc.runtime.engines.onnxruntime_cpu import ERRORS
from splitc.runtime.requests.preamble import HIDING, is_causal

# Requests that masks are tried with: numbers of cached tokens, and of new ones.
BEFORE, NEW = (0, 1, 5), (1, 2, 7)
# Masks are not tried if their graph has a constant larger than this, which may be a window. A choice: no cache today
# holds more tokens.
MOST = 1 << 18
# The most new tokens that a mask longer than its window is tried with. A choice: such masks have a million elements.
MOST_NEW = 1 << 10
# In a Slice, integers from here on mean "to the end".
END = (1 << 31) - 1
# Larger float32 numbers are no counts of tokens: float32 does not hold all integers there.
UNCOUNTED = 1 << 24


@dataclass(frozen=True)
class Plain:
    """Which requests are plain: the preamble's inputs `ones` hold only ones, with a last axis of all tokens so far.

    Masks then hide later tokens. Those with an entry in `windows` show only that many tokens up to the current one.
    `batched` are those of the inputs with a batch axis whose size is known only from the request.
    """

    ones: tuple[str, ...]
    windows: Mapping[str, int]
    batched: tuple[str, ...] = ()


@dataclass(frozen=True)
class _Numbers:
    """The sizes of a request: rows of the batch, cached tokens, and new tokens."""

    batch: int
    before: int
    new: int


def find_plain(
    graph: ir.Graph,
    masks: Collection[str],
    blanks: Collection[str],
    filled: Sequence[Filled],
    sizes: Sizes,
    padding: Collection[str],
) -> Plain | None:
    """Which requests are plain; None if the masks depend on other inputs too, or may be anything but causal.

    None also if such a request has entirely masked rows, by the `blanks`. `padding` are the names of the inputs that
    tell tokens from padding. The masks are tried with more tokens than any constant in the graph, so that a window of
    any length has an effect.
    """
    made = [value for value in graph.outputs if value.name in masks or value.name in blanks]
    ones = [value for value in _contents_read(made) if value.is_graph_input()]
    if not masks or len(filled) != 1 or any(value.name not in padding for value in ones):
        return None
    largest, second = sorted({*_numbers(graph), 0, 1})[-1:-3:-1]
    if largest > MOST:
        return None
    most = min(largest * max(1, second), MOST)  # a window may be a number of chunks times their length
    named = frozenset(value.name or "" for value in ones)
    tried = _Tried(graph, tuple(masks), tuple(blanks), filled[0], sizes, named)
    windows = tried.windows(most)
    batched = tuple(value.name or "" for value in ones if is_batched(sizes.axes(value), tried.batch))
    return None if windows is None else Plain(tuple(value.name or "" for value in ones), windows, batched)


def is_batched(axes: Sequence[Axis] | None, batch: Size | None) -> bool:
    """Whether axes are a batch and tokens, and the batch has another symbol than that of the caches."""
    return axes is not None and len(axes) == 2 and axes[0].fixed is None and axes[0].size != batch is not None


def _contents_read(values: Sequence[ir.Value]) -> list[ir.Value]:
    """All values whose contents, rather than only shapes, these values depend on."""

    def above(value: ir.Value) -> list[ir.Value]:
        node = value.producer()
        read = [] if node is None or operator_of(node).reads_shape else node.inputs
        return [one for one in read if one is not None]

    return list(reached(values, above))


def _numbers(graph: ir.Graph) -> Iterator[int]:
    """The numbers in a graph that may be a window: constants, also folded ones, attributes, and sizes of constants."""
    copy = with_own_tensors(graph)
    fold_shapes(copy)
    for value in (*copy.initializers.values(), *(value for node in copy for value in node.outputs)):
        if value.const_value is not None:
            yield from map(int, value.const_value.shape.numpy())
            yield from _counts(value.const_value.numpy())
    for attribute in (attribute for node in graph for attribute in node.attributes.values()):
        if attribute.type in (ir.AttributeType.INT, ir.AttributeType.INTS):
            yield from _counts(np.array(attribute.value, np.int64))
        elif attribute.type == ir.AttributeType.TENSOR:
            yield from _counts(attribute.as_tensor().numpy())


def _counts(array: np.ndarray) -> Iterator[int]:
    numbers = array.astype(np.float64).ravel()
    end = END if array.dtype.kind in "iu" else UNCOUNTED
    counts = np.abs(numbers[np.isfinite(numbers) & (numbers > HIDING)])
    yield from map(int, np.ceil(counts[counts < end]))


@dataclass(frozen=True)
class _Tried:
    """Computes a preamble's masks for some requests, whose inputs named in `ones` hold only ones."""

    graph: ir.Graph
    masks: tuple[str, ...]
    blanks: tuple[str, ...]
    filled: Filled
    sizes: Sizes
    ones: frozenset[str]

    @property
    def batch(self) -> Size | None:
        """The size of the caches' batch axis; None if it is fixed."""
        axes = self.sizes.axes(self.filled.lasts)
        return axes[0].size if axes and axes[0].fixed is None else None

    def windows(self, most: int) -> dict[str, int] | None:
        """The windows of masks by name, read off the longest request. Masks that show all earlier tokens have none.

        None if a mask hides anything else in a request of a few tokens, or of more than `most`.
        """
        windows = None
        try:
            session = open_alone(with_own_tensors(self.graph))
            for numbers in self._requests(most):
                feeds = self._feeds(numbers)
                if feeds is None:
                    return None
                names = [*self.masks, *self.blanks]
                results = dict(zip(names, run_on_arrays(session, names, feeds), strict=True))
                if any(results[name].any() for name in self.blanks):
                    return None
                made = {name: results[name] for name in self.masks}
                if not all(_is_whole(mask, numbers) for mask in made.values()):  # as one that is cut from a constant
                    return None
                windows = _windows(made, numbers) if windows is None else windows
                if not all(is_causal(mask, numbers.before, windows.get(name)) for name, mask in made.items()):
                    return None
        except ERRORS:
            return None
        return windows

    def _requests(self, most: int) -> Iterator[_Numbers]:
        """Requests to try, the longest first."""
        step = self.filled.step
        new = [step] if isinstance(step, int) else [*NEW, *([most + 3] if most + 3 <= MOST_NEW else [])]
        for before in (2 * most + 5, most + 3, *BEFORE):
            for tokens in new if before <= MOST_NEW else new[:2]:
                yield _Numbers(1 + before % 2, before, tokens)

    def _feeds(self, numbers: _Numbers) -> dict[str, np.ndarray] | None:
        """The inputs of a request; None if the size of one is not known."""
        known, feeds = self._known(numbers), {}
        for value in self.graph.inputs:
            name, axes = value.name or "", self.sizes.axes(value)
            if axes is None or value.dtype is None:
                return None
            shape = [known.get(axis.size) if axis.fixed is None else axis.fixed for axis in axes]
            if name in self.ones and shape:  # the runtime checks it: a mask may have a length of its own
                shape[-1] = numbers.before + numbers.new
                if is_batched(axes, self.batch):
                    shape[0] = numbers.batch
            if None in shape:
                return None
            feeds[name] = np.full([size for size in shape if size is not None], name in self.ones, value.dtype.numpy())
        return feeds

    def _known(self, numbers: _Numbers) -> dict[Size, int]:
        """The values of dynamic sizes in a request."""
        filled, rows = self.filled, numbers.before + numbers.new
        known = {filled.past.size: numbers.before, filled.all.size: rows}
        if not isinstance(filled.step, int):
            (name, axis) = filled.step
            known[self.sizes.shapes[name][axis], self.sizes.probes[name][axis]] = numbers.new
        for value, number in ((filled.lasts, numbers.batch), (filled.room, rows + 3)):
            axes = None if value is None else self.sizes.axes(value)
            if axes and axes[0].fixed is None:
                known[axes[0].size] = number
        return known


def _windows(masks: Mapping[str, np.ndarray], numbers: _Numbers) -> dict[str, int]:
    """By mask, how many tokens it shows to the last one; masks that show all are omitted."""
    rows = numbers.before + numbers.new
    shown = {name: np.count_nonzero(mask[..., -1, :rows] == 0, axis=-1).max() for name, mask in masks.items()}
    return {name: int(count) for name, count in shown.items() if 0 < count < rows}


def _is_whole(mask: np.ndarray, numbers: _Numbers) -> bool:
    new, rows = mask.shape[-2:]
    return bool(new == numbers.new and rows >= numbers.before + numbers.new)
