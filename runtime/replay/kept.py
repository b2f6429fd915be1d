"""Which recordings are kept, for which kinds of requests others are made, and which states wait for a new sequence."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable, Mapping
from typing import Any

from splitc.runtime.engines import NEW
from splitc.runtime.gpu_feeds import GpuFeed
from splitc.runtime.ranks.request import InFlightRequest
from splitc.runtime.ranks.thread import Worker
from splitc.runtime.replay.recording import Recording

# The states of a sequence on this rank.
States = dict[str, Any]
# The kind of a request: what is equal for requests with the same work.
Kind = tuple[Any, ...]
# The most recordings that are kept, and the most kinds of requests that are remembered as seen.
MOST, REMEMBERED = 8, 64
# The most ended sequences whose states are kept for new ones.
MOST_SPARE = 2
# A recording is unused if this many requests came since its last replay.
IDLE = 64


class KeptRecordings:
    """Recordings by the place of their states, which is valid as long as these are alive, and by kind of request.

    `requests` counts requests.
    """

    def __init__(self) -> None:
        self.requests = 0
        self._kept: OrderedDict[tuple[Hashable, Kind], Recording] = OrderedDict()
        self._seen: OrderedDict[Kind, int] = OrderedDict()
        # States of ended sequences, for which there are recordings.
        self._spare: dict[Hashable, States] = {}

    def all(self) -> list[Recording]:
        """All recordings that are kept."""
        return list(self._kept.values())

    def pop(self, place: Hashable, kind: Kind) -> Recording | None:
        """Take a recording out, to keep it again when it is used. None if there is none."""
        return self._kept.pop((place, kind), None)

    def keep(self, place: Hashable, kind: Kind, recording: Recording) -> None:
        """Keep a recording that the current request uses. The oldest one may be dropped for it."""
        recording.last = self.requests
        self._kept[place, kind] = recording
        if len(self._kept) > MOST:
            self._drop(next(iter(self._kept))[0], 1)

    def is_worth(self, kind: Kind) -> bool:
        """Whether to record a request of this kind: engines know its shapes well, and there is room.

        Recordings in use are not dropped for others. Otherwise, with more sequences than recordings, each request would
        make a new one.
        """
        count = self._seen.get(kind, 0)
        self._seen[kind] = count + 1
        self._seen.move_to_end(kind)
        if len(self._seen) > REMEMBERED:
            self._seen.popitem(last=False)
        oldest = next(iter(self._kept.values()), None)
        has_room = len(self._kept) < MOST or oldest is None or self.requests - oldest.last > IDLE
        return count > NEW and has_room

    def forget(self, place: Hashable, states: States) -> None:
        """End a sequence. If there are recordings for its states, these are kept for another sequence."""
        if any(known == place for known, _ in self._kept):
            self._spare[place] = states
        if len(self._spare) > MOST_SPARE:
            self._drop(next(iter(self._spare)), MOST)

    def take_spare(self, fits: Callable[[States], bool]) -> States | None:
        """The states of an ended sequence, for a new one that they fit. None if there are none."""
        for place, states in self._spare.items():
            if fits(states):
                return self._spare.pop(place)
        return None

    def _drop(self, place: Hashable, count: int) -> None:
        """Drop up to `count` recordings with these states, the oldest first."""
        for key in [key for key in self._kept if key[0] == place][:count]:
            del self._kept[key]
        if not any(known == place for known, _ in self._kept):
            self._spare.pop(place, None)

    def clear(self) -> None:
        """Drop all recordings."""
        self._kept.clear()
        self._spare.clear()


def kind_of(request: InFlightRequest, states: Mapping[str, Any]) -> Kind:
    """The request's kind: its shapes, and the lengths of its sequence's states; which of its feeds are on GPUs."""
    shapes = [(name, array.shape) for name, array in request.feeds.items()]
    shapes += [(name, states[name].shape) for name in list(states)[:1]]
    on_gpus = tuple(name for name, feed in request.feeds.items() if isinstance(feed, GpuFeed))
    return request.sequence is None, request.room, request.on_device, on_gpus, *shapes


def fit(worker: Worker, request: InFlightRequest, states: Mapping[str, Any]) -> bool:
    """Whether a rank's states have the shapes and types of those that the request's sequence begins with."""
    zeros = worker.zeros_of(request)
    return all((zeros[name].shape, zeros[name].dtype) == (state.shape, state.dtype) for name, state in states.items())
