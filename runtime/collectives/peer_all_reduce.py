"""All-reduce over GPUs with peer access. Their threads meet only to exchange the addresses of the parts."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from splitc.runtime.engines.gpu_array import GpuArray
from splitc.runtime.engines.gpu_device import GpuDevice
from splitc.runtime.failures import Failure, attempt
from splitc.runtime.steps import Reduce

# Slices begin at multiples of this many bytes.
ALIGNED = 256


@dataclass(frozen=True)
class Offer:
    """A rank's parts of a reduction, which others may read once the event `ready` has completed."""

    parts: Sequence[GpuArray]
    ready: Any


class PeerAllReduce:
    """The end of one rank. `all_gather` is the method of its collectives.

    No GPU waits for a rank that has failed: the threads exchange failures when they meet.
    """

    def __init__(self, gpu: GpuDevice, rank: int, all_gather: Callable[[Sequence[int], Any], Any]) -> None:
        self._gpu = gpu
        self._rank = rank
        self._all_gather = all_gather
        self._offered: dict[tuple[int, ...], Any] = {}

    def run(self, step: Reduce, parts: Any) -> Any:
        """The results of the step, or a Failure. `parts` are this rank's parts, or its Failure."""
        offers = self._exchange(step, parts)
        if isinstance(offers, Failure):
            return offers
        # When the others make new offers, they have read this rank's previous one: only now may its memory be freed.
        self._offered[tuple(step.ranks)] = parts
        columns = list(zip(*(offer.parts for offer in offers), strict=True))
        large = sum(part.nbytes for part in parts) >= self._gpu.profile.two_step_bytes
        if len(offers) > 2 and large:
            return self._run_in_two_steps(step, columns)
        return attempt(lambda: _combine(self._gpu, step.operation, columns))

    def _exchange(self, step: Reduce, parts: Any) -> Any:
        """The offers of all ranks, or a Failure. This rank's stream waits until the offers are ready."""
        own = parts if isinstance(parts, Failure) else attempt(lambda: Offer(parts, self._gpu.record()))
        offers = self._all_gather(step.ranks, own)
        if not isinstance(offers, Failure):
            for offer in offers:
                self._gpu.stream.wait_event(offer.ready)
        return offers

    def _run_in_two_steps(self, step: Reduce, columns: Sequence[Sequence[GpuArray]]) -> Any:
        """Each rank reduces one slice and copies the others from the other ranks: a reduce-scatter and an all-gather.

        With n ranks, each reads 2 (n - 1) / n times the bytes of the value, instead of n - 1 times.
        """
        count, place = len(step.ranks), list(step.ranks).index(self._rank)
        own = attempt(lambda: _combine(self._gpu, step.operation, columns, (place, count)))
        offers = self._exchange(step, own)
        if isinstance(offers, Failure):
            return offers
        wholes = offers[place].parts
        for number, whole in enumerate(wholes):
            others = (slices(offer.parts[number], count) for offer in offers)
            for other, (target, made) in enumerate(zip(slices(whole, count), others, strict=True)):
                if other != place:
                    self._gpu.copy_over(target, made[other])
        self._offered[tuple(step.ranks)] = [self._offered[tuple(step.ranks)], wholes]
        return wholes


def slices(array: GpuArray, count: int) -> list[GpuArray]:
    """The array's elements in `count` slices. The last ones may be smaller, or empty."""
    size = math.prod(array.shape)
    width = array.nbytes // size if size else 1
    step = -(-size // count)
    step = -(-step * width // ALIGNED) * ALIGNED // width
    starts = [min(size, number * step) for number in range(count + 1)]
    return [
        GpuArray(array.pointer + start * width, (end - start,), array.dtype, array.owner)
        for start, end in pairwise(starts)
    ]


def _combine(
    gpu: GpuDevice, operation: str, columns: Sequence[Sequence[GpuArray]], piece: tuple[int, int] | None = None
) -> list[GpuArray]:
    """Reduce each column of parts. With `piece` (number, count), only that slice of the results is filled."""
    wholes = [gpu.empty(column[0].shape, column[0].dtype) for column in columns]
    for column, whole in zip(columns, wholes, strict=True):
        arrays = [*column, whole]
        if piece is not None:
            arrays = [slices(each, piece[1])[piece[0]] for each in arrays]
        gpu.combine(operation, arrays[:-1], arrays[-1])
    return wholes
