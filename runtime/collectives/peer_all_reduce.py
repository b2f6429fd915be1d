"""All-reduce over GPUs that read each other's memory: their threads meet only to say where the parts will be."""

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

# Bytes that slices begin at multiples of.
ALIGNED = 256


@dataclass(frozen=True)
class Offer:
    """A rank's parts of a sum, for others to read once `ready` has happened."""

    parts: Sequence[GpuArray]
    ready: Any


class PeerAllReduce:
    """The end of one rank. `all_gather` is that of its collectives.

    No GPU waits for what will not come: a rank that fails says so when the threads meet.
    """

    def __init__(self, gpu: GpuDevice, rank: int, all_gather: Callable[[Sequence[int], Any], Any]) -> None:
        self._gpu = gpu
        self._rank = rank
        self._all_gather = all_gather
        self._offered: dict[tuple[int, ...], Any] = {}

    def run(self, step: Reduce, parts: Any) -> Any:
        """The wholes of the step, or a Failure; `parts` are this rank's, or its Failure."""
        offers = self._exchange(step, parts)
        if isinstance(offers, Failure):
            return offers
        # The others have read what this rank offered before when they offer the next: its memory may go only now.
        self._offered[tuple(step.ranks)] = parts
        columns = list(zip(*(offer.parts for offer in offers), strict=True))
        large = sum(part.nbytes for part in parts) >= self._gpu.profile.two_step_bytes
        if len(offers) > 2 and large:
            return self._run_in_two_steps(step, columns)
        return attempt(lambda: _combine(self._gpu, step.operation, columns))

    def _exchange(self, step: Reduce, parts: Any) -> Any:
        """The offers of all ranks, which this rank's stream waits for, or a Failure."""
        own = parts if isinstance(parts, Failure) else attempt(lambda: Offer(parts, self._gpu.record()))
        offers = self._all_gather(step.ranks, own)
        if not isinstance(offers, Failure):
            for offer in offers:
                self._gpu.stream.wait_event(offer.ready)
        return offers

    def _run_in_two_steps(self, step: Reduce, columns: Sequence[Sequence[GpuArray]]) -> Any:
        """Each rank combines a slice, and takes the others' slices from them: 2 (n - 1) / n of the bytes, not n - 1.

        That is a reduce-scatter and an all-gather.
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
    """The array's elements in so many pieces, of which the last may be smaller, or empty."""
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
    """The wholes of the columns' parts; where a piece is asked for, only that one of so many is filled."""
    wholes = [gpu.empty(column[0].shape, column[0].dtype) for column in columns]
    for column, whole in zip(columns, wholes, strict=True):
        arrays = [*column, whole]
        if piece is not None:
            arrays = [slices(each, piece[1])[piece[0]] for each in arrays]
        gpu.combine(operation, arrays[:-1], arrays[-1])
    return wholes
