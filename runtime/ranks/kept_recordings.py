"""Which recordings to keep, which requests to record, and which states to reuse for a new sequence."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from typing import Any, NamedTuple

from splitc.runtime.arrays.array import Zeros
from splitc.runtime.feeds.on_gpu import GpuFeed
from splitc.runtime.ranks.recording import Recording
from splitc.runtime.ranks.request import InFlightRequest

# The states of a sequence on this rank.
States = dict[str, Any]
# The most recordings that are kept, each with buffers on the GPU, and the most kinds of requests that are counted, or
# remembered as refused. A choice: each recording holds the activations and states of its request, and a kind that was
# forgotten runs eagerly a few times more.
MOST, REMEMBERED = 8, 64
# A request is recorded if more than so many came of its kind. Beyond a FEW kinds, each comes twice as often as the one
# before it, and so do requests that begin a sequence, so many times. A choice: these are prompts, which have ever new
# lengths. To record one takes 0.5 to 1.8 s for 8 layers on H200s, since each attention is planned for its length
# (engines/variables.py), and each replay then gains 1 to 2 ms.
NEW, FEW, MOST_DOUBLINGS, FOR_PROMPTS = 2, 4, 8, 5
# The most ended sequences whose states are kept for new ones. A choice: each holds a sequence's caches; without any, a
# new sequence would be recorded anew.
MOST_SPARE = 2
# A recording is unused if this many requests came since its last replay. A choice: 8 for each recording that is kept.
IDLE = 64


class Kind(NamedTuple):
    """The kind of a request. Requests of one kind do the same work.

    - `adapters`: the number of their sum.
    - `feeds`: the names and shapes of the feeds.
    - `states`: the sizes of the sequence's states.
    - `how`: the other options of the request, and which feeds are on GPUs.
    """

    adapters: int | None
    feeds: tuple[tuple[str, tuple[int, ...]], ...]
    states: tuple[Any, ...]
    how: tuple[Any, ...]


@dataclass(frozen=True)
class Home:
    """The memory of a sequence's states on the ranks.

    - `number`: the sequence whose initial states were allocated there.
    - `sizes`: the names, shapes and types of the initial states.
    - `is_zeros`: whether these were zeros. Then another sequence may reuse the memory.
    - `growth`: the number of requests in which states grew. Each moved them to other memory.
    """

    number: int
    sizes: tuple[Any, ...]
    is_zeros: bool = False
    growth: int = 0


class KeptRecordings:
    """Recordings by the home of their states and the kind of request. `requests` counts requests.

    With `same_feeds`, recordings of only one set of feed shapes are kept at a time. To run engines with convolutions on
    other shapes before a capture unloads kernels of earlier recordings (see UNLOADED of replayable.py). Recordings with
    other state sizes are kept: convolutions are assumed not to read caches.
    """

    def __init__(self, same_feeds: bool = False) -> None:
        self.requests = 0
        self._same_feeds = same_feeds
        self._kept: OrderedDict[tuple[Home, Kind], Recording] = OrderedDict()
        self._seen: OrderedDict[Kind, int] = OrderedDict()
        # The kinds that were recorded, the latest last.
        self._recorded: OrderedDict[Kind, None] = OrderedDict()
        # States of ended sequences, for which there are recordings.
        self._spare: OrderedDict[Home, States] = OrderedDict()

    def pop(self, home: Home, kind: Kind) -> Recording | None:
        """Take a recording out, to pass it to `keep` when it is used. None if there is none."""
        return self._kept.pop((home, kind), None)

    def keep(self, home: Home, kind: Kind, recording: Recording) -> None:
        """Keep a recording that the current request uses. For a new one, `make_room` must have been called."""
        if not recording.last:  # a new one
            self._recorded[kind] = None
            if len(self._recorded) > REMEMBERED:
                self._recorded.popitem(last=False)
        recording.last = self.requests
        self._kept[home, kind] = recording

    def make_room(self, kind: Kind) -> None:
        """Drop the recordings that can't be kept beside a new one of this kind."""
        for key in self._rivals(kind):
            del self._kept[key]
            if not self._knows(key[0]):
                self._spare.pop(key[0], None)

    def _rivals(self, kind: Kind) -> list[tuple[Home, Kind]]:
        """The recordings to drop for a new one of this kind: the oldest if there are many, and those of other feeds."""
        beyond = len(self._kept) + 1 - MOST
        return [
            key
            for number, key in enumerate(self._kept)
            if number < beyond or (self._same_feeds and key[1].feeds != kind.feeds)
        ]

    def is_worth(self, kind: Kind, begins: bool = False) -> bool:
        """Whether to record a request of this kind, which `begins` a sequence: it came often enough, and has room.

        Recordings in use are not dropped for others. Otherwise, with more sequences than recordings, each request would
        make a new one.
        """
        count = self._seen.get(kind, 0)
        self._seen[kind] = count + 1
        self._seen.move_to_end(kind)
        if len(self._seen) > REMEMBERED:
            self._seen.popitem(last=False)
        may_be_kept = all(self.requests - self._kept[key].last > IDLE for key in self._rivals(kind))
        doublings = min(max(0, len(self._recorded) + 1 - FEW) + FOR_PROMPTS * begins, MOST_DOUBLINGS)
        doublings = 0 if kind in self._recorded else doublings
        return count > NEW << doublings and may_be_kept

    def spare(self, home: Home, states: States) -> None:
        """Keep the states of an ended sequence for another one, if there are recordings for them."""
        if self._knows(home):
            self._spare[home] = states
        if len(self._spare) > MOST_SPARE:
            self.drop(next(iter(self._spare)))

    def take_spare(self, wanted: Home) -> tuple[Home, States] | None:
        """The home and states of an ended sequence that fit a new one. None if there are none."""
        fitting = next((home for home in self._spare if wanted.is_zeros and home.sizes == wanted.sizes), None)
        return None if fitting is None else (fitting, self._spare.pop(fitting))

    def drop(self, home: Home) -> None:
        """Drop all recordings with these states, which are about to be freed."""
        for key in [key for key in self._kept if key[0] == home]:
            del self._kept[key]
        self._spare.pop(home, None)

    def drop_adapters(self, number: int) -> None:
        """Drop all recordings with this sum of adapters."""
        for key in [key for key in self._kept if key[1].adapters == number]:
            del self._kept[key]

    def _knows(self, home: Home) -> bool:
        return any(known == home for known, _ in self._kept)

    def clear(self) -> None:
        """Drop all recordings."""
        self._kept.clear()
        self._spare.clear()


def home_of(request: InFlightRequest) -> Home:
    """The home of the sequence that begins with this request."""
    assert request.sequence is not None, "only sequences begin with something"
    sizes = tuple((name, state.shape, str(state.dtype)) for name, state in request.initial.items())
    is_zeros = request.after is None and all(isinstance(state, Zeros) for state in request.initial.values())
    return Home(request.sequence, sizes, is_zeros)


def kind_of(request: InFlightRequest, home: Home) -> Kind:
    """The request's kind, with its states in this home."""
    shapes = tuple((name, array.shape) for name, array in request.feeds.items())
    on_gpus = tuple(name for name, feed in request.feeds.items() if isinstance(feed, GpuFeed))
    how = request.sequence is None, request.in_place, request.on_device
    adapters = None if request.adapters is None else request.adapters.number
    return Kind(adapters, shapes, (home.sizes, home.growth), (*how, on_gpus))
