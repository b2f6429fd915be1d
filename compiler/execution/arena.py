"""Replays ONNX Runtime's arena: the memory it takes from the system for a sequence of allocations.

The rules are those of BFCArena (core/framework/bfc_arena.cc of ONNX Runtime 1.31) with its default options. Sizes are
rounded up to 256 bytes. The smallest free chunk that fits is used; of several that are equal, the one at the lowest
address. A chunk that is twice as large as needed is divided. Each new region is twice as large as the last one.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterable

from splitc.runtime.hardware.heap import LARGEST_LEARNT

UNIT = 256
FIRST_REGION, LARGEST_STEP = 1 << 20, 1 << 30
# A rest of so many bytes is cut off a chunk of any size.
LARGEST_REST = 128 << 20

# Of the host's memory a region takes a number for each UNIT in it (AllocationRegion in core/framework/bfc_arena.h).
NUMBER = 8

# A chunk's place: its region, in the order of addresses, and its offset.
Place = tuple[int, int]


class Arena:
    """Memory regions in which values are allocated and freed. Sizes are in bytes.

    On the host, small regions are placed at increasing addresses in the heap of the rank's thread. Large ones are
    placed below it, at decreasing addresses (see `compact_heap`). If not `on_host`, all regions grow in one direction,
    `downwards` or upwards, and ONNX Runtime's bookkeeping is stored elsewhere.
    """

    def __init__(self, on_host: bool = True, downwards: bool = True) -> None:
        self._on_host, self._downwards = on_host, downwards
        self._free: list[tuple[int, int, int]] = []  # size, region, offset
        self._sizes: dict[Place, int] = {}  # of all chunks
        self._before: dict[Place, int] = {}  # the offset of the chunk before
        self._is_free: set[Place] = set()
        self._step = FIRST_REGION
        self._touched: dict[int, int] = {}
        self._noted = 0
        self._noted_share = NUMBER / UNIT if on_host else 0
        self._gaps: list[int] = []
        self._is_open = False  # whether no region came after the last gap

    @property
    def touched(self) -> int:
        """Bytes that were touched: regions up to their highest use, gaps between regions, and bookkeeping.

        The system provides no memory for pages that are never touched.
        """
        return sum(self._touched.values()) + sum(self._gaps) + self._noted

    def allocate(self, size: int) -> Place:
        """The place of a new chunk."""
        size = -(-max(size, 1) // UNIT) * UNIT
        at = bisect_left(self._free, (size,))
        if at == len(self._free):
            self._extend(size)
            at = bisect_left(self._free, (size,))
        whole, region, offset = self._free.pop(at)
        self._is_free.discard((region, offset))
        if whole >= 2 * size or whole - size >= LARGEST_REST:
            self._sizes[region, offset] = size
            if (after := (region, offset + whole)) in self._sizes:
                self._before[after] = offset + size
            self._before[region, offset + size] = offset
            self._put((region, offset + size), whole - size)
        self._touched[region] = max(self._touched[region], offset + size)
        return region, offset

    def size(self, place: Place) -> int:
        """The bytes of a chunk, which may be more than what was asked for."""
        return self._sizes[place]

    def free(self, place: Place) -> None:
        """Free a chunk, and merge it with free neighbours."""
        region, offset = place
        size = self._sizes[place]
        after = (region, offset + size)
        if after in self._is_free:
            size += self._take(after)
        before = self._before.get(place)
        if before is not None and (region, before) in self._is_free:
            del self._sizes[place], self._before[place]
            size, offset = size + self._sizes[region, before], before
            self._unlist((region, before))
        if (after := (region, offset + size)) in self._sizes:
            self._before[after] = offset
        self._put((region, offset), size)

    def pass_by(self, sizes: Iterable[int]) -> None:
        """Allocate chunks of these sizes together and free them again, as kernels do with scratch memory."""
        for place in [self.allocate(size) for size in sizes if size]:
            self.free(place)

    def reserve(self, sizes: Iterable[int]) -> None:
        """Take blocks from the heap, outside the arena, and free each before the next (BFCArena::Reserve).

        A block fits where an earlier one was, or leaves a gap at the end of the heap. The gap may grow until a region
        follows.
        """
        for size in sizes:
            if size > max(self._gaps, default=0):
                self._gaps = [*(self._gaps[:-1] if self._is_open else self._gaps), size]
                self._is_open = True

    def _extend(self, size: int) -> None:
        is_enough = size <= self._step
        while size > self._step:
            self._step *= 2
        upwards = self._step < LARGEST_LEARNT if self._on_host else not self._downwards
        region = len(self._touched) if upwards else -len(self._touched)
        self._touched[region] = 0
        self._noted += int(self._step * self._noted_share)
        self._is_open = False
        self._put((region, 0), self._step)
        if is_enough and self._step < LARGEST_STEP:
            self._step *= 2

    def _put(self, place: Place, size: int) -> None:
        self._sizes[place] = size
        self._is_free.add(place)
        insort(self._free, (size, *place))

    def _unlist(self, place: Place) -> None:
        self._is_free.discard(place)
        self._free.pop(bisect_left(self._free, (self._sizes[place], *place)))

    def _take(self, place: Place) -> int:
        """Remove a free chunk. Returns its size."""
        self._unlist(place)
        self._before.pop(place, None)
        return self._sizes.pop(place)
