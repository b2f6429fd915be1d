"""Sums of adapters that ranks hold: each goes to them once, and is kept for later requests, within budgets."""

from __future__ import annotations

import gc
import threading
import weakref
from collections import OrderedDict, deque
from collections.abc import Callable, Hashable, Iterator, Mapping
from dataclasses import dataclass
from weakref import WeakValueDictionary

from splitc.runtime.arrays.array import Array
from splitc.runtime.errors import DoesNotFitError
from splitc.runtime.package.manifest import Rank
from splitc.runtime.package.parts import cut_places


@dataclass(frozen=True, eq=False)
class HeldSum:
    """The inputs of slots, by name, for a sum of adapters. Ranks hold them under its number until it is forgotten.

    Numbers are those of sequences too: one is never given to both. On a rank in a process of its own there are no
    `arrays` from the second request on.
    """

    number: int
    arrays: Mapping[str, Array]


def shards_of(arrays: Mapping[str, Array], rank: Rank) -> dict[str, Array]:
    """A rank's shards of a sum's arrays, by its engines' names for them."""
    return {
        override.value: cut_places(arrays[override.input], override.places)
        for override in rank.overrides
        if override.input in arrays
    }


# The sums of adapters that are kept. A choice: a server has a few styles, each with its strength.
KEPT = 8


class KeptSums:
    """The last sums that requests had. Ranks hold these, and those that requests or sequences still have.

    `numbers` are new ones that ranks know sums by. Those that nobody has any more are put into `dropped`. The ranks of
    all that are held are at most `most_rank`, if it is given: then sums are dropped that are only kept.
    """

    def __init__(self, numbers: Iterator[int], dropped: deque[int], most_rank: int | None) -> None:
        self._numbers, self._dropped, self._most = numbers, dropped, most_rank
        self._kept: OrderedDict[Hashable, HeldSum] = OrderedDict()
        # Those of requests and sequences too.
        self._held: WeakValueDictionary[Hashable, HeldSum] = WeakValueDictionary()
        self._ranks: dict[int, int] = {}  # of all that are held, by their numbers
        self._lock = threading.Lock()

    def get(self, key: Hashable, rank: int, make: Callable[[], Mapping[str, Array]]) -> HeldSum:
        """The sum kept under a key, of this rank, or a new one from `make`.

        Raises DoesNotFitError if the sums of requests and sequences would exceed the budgets.
        """
        with self._lock:
            held = self._held.get(key)
            if held is None:
                self._make_room(rank)
                held = self._hold(rank, make())
            self._kept[key] = self._held[key] = held
            self._kept.move_to_end(key)
            if len(self._kept) > KEPT:
                self._kept.popitem(last=False)
            return held

    def clear(self) -> None:
        """Keep no sums."""
        with self._lock:
            self._kept.clear()
            self._held.clear()

    def _make_room(self, rank: int) -> None:
        while self._kept and self._lacks(rank):
            self._kept.popitem(last=False)
        if self._lacks(rank):
            gc.collect()  # a request that failed is in its error's traceback
        if self._lacks(rank):
            taken = self._taken()
            raise DoesNotFitError(
                f"the budgets leave room for adapters of rank {self._most} in all, where a sum's rank is padded to a "
                f"power of two: this one takes {rank}, and requests and open sequences have {taken}. End these, load "
                f"adapters of smaller rank, or compile with --lora-slots {taken + rank} or a larger --memory"
            )

    def _lacks(self, rank: int) -> bool:
        return self._most is not None and self._taken() + rank > self._most

    def _taken(self) -> int:
        return sum(list(self._ranks.values()))  # a copy, since other threads may drop some

    def _hold(self, rank: int, arrays: Mapping[str, Array]) -> HeldSum:
        made = HeldSum(next(self._numbers), arrays)
        self._ranks[made.number] = rank
        weakref.finalize(made, self._drop, made.number).atexit = False
        return made

    def _drop(self, number: int) -> None:
        """The callback for a sum that is no longer used. Any thread may call it."""
        del self._ranks[number]
        self._dropped.append(number)
