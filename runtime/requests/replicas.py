"""Replicas: groups of ranks with the whole model each, which divide the rows of a request.

Replicas exchange nothing. A request of several rows is divided into a part for each of them. Any other goes whole to
the least busy one. A sequence stays on the replicas of its first request, its rows divided in the same way.
"""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from functools import partial

from splitc.runtime.arrays.array import Array, Zeros
from splitc.runtime.errors import FeedError, HandOverError
from splitc.runtime.feeds.on_gpu import Feed
from splitc.runtime.feeds.rows import count_rows, cut_rows, share_rows
from splitc.runtime.hardware.memory_use import RankMemory
from splitc.runtime.package.manifest import Manifest
from splitc.runtime.processes.remote import RemoteRanks
from splitc.runtime.ranks.request import NEVER, InFlightRequest, nothing_to_do
from splitc.runtime.ranks.workers import PATIENCE, Workers

# The replicas that have a request's rows, in their order, and how many; None for all, however many.
_Division = list[tuple[int, int | None]]


class Replicas:
    """The ranks of all replicas, numbered one replica after the other. For the methods see Workers.

    `shares` are the replicas' shares of a request's rows.
    """

    def __init__(self, replicas: Sequence[Workers | RemoteRanks], manifest: Manifest, shares: Sequence[float]) -> None:
        assert manifest.batch is not None, "rows can be divided"
        self._replicas = replicas
        self._axes, self._sources = manifest.batch, manifest.row_sources
        self._shares = shares
        self._size = len(replicas[0])
        # The requests that each replica works at.
        self._at_work = [0] * len(replicas)
        self._lock = threading.Lock()
        # Where the sequences are.
        self._sequences: dict[int, _Division] = {}

    def __len__(self) -> int:
        return self._size * len(self._replicas)

    def check_rows(self, sequence: int, arrays: Mapping[str, Feed | Zeros]) -> None:
        """Raise FeedError unless a request's arrays have as many rows as the first request of its sequence."""
        counts = [count for _, count in self._sequences.get(sequence, ()) if count is not None]
        if counts and (rows := self._count_rows(arrays)) != sum(counts):
            has = "inputs with different numbers of rows" if rows is None else f"{rows}"
            raise FeedError(
                f"this sequence began with {sum(counts)} rows, of which {len(counts)} groups of devices have "
                f"{', '.join(map(str, counts))}, and the request has {has}: give it as many, or start another sequence"
            )

    def _count_rows(self, arrays: Mapping[str, Feed | Zeros]) -> int | None:
        return count_rows(arrays, self._axes, self._sources)

    def divide(self, request: InFlightRequest) -> None:
        """Set the parts of a request. A later one of a sequence must have passed `check_rows`."""
        rows = self._count_rows({**request.initial, **request.feeds})
        began = request.sequence if request.after is None else request.after
        division = None if began is None else self._sequences.get(began)
        if division is None:
            division = self._divide(rows)
        elif division[0][1] is not None:
            rows = sum(count or 0 for _, count in division)
        if division is None:
            request.parts = [_part(request, None, request.feeds, request.initial)]
            return
        if request.sequence is not None:
            self._sequences[request.sequence] = division
        request.parts = []
        start = 0
        for replica, count in division:
            if count is None:
                request.parts.append(_part(request, replica, request.feeds, request.initial))
                continue
            assert rows is not None, "they are counted"
            feeds = cut_rows(request.feeds, self._axes, rows, start, start + count)
            initial = cut_rows(request.initial, self._axes, rows, start, start + count)
            request.parts.append(_part(request, replica, feeds, initial))
            start += count

    def _divide(self, rows: int | None) -> _Division | None:
        """The number of rows for each replica; None if the request stays whole.

        Inputs that disagree on the rows may still be valid for the model.
        """
        if rows is None or rows < 2:
            return None
        order = sorted(range(len(self._shares)), key=self._at_work.__getitem__)
        counts = share_rows(rows, self._shares, order)
        return [(replica, count) for replica, count in enumerate(counts) if count]

    def put(self, request: InFlightRequest | None) -> None:
        """Give each part to its replica.

        If that fails for one, the request fails once the others have ended: until then they use memory.
        """
        if request is None:
            for ranks in self._replicas:
                ranks.put(None)
            return
        request.waiting = self._size * len(request.parts)
        for number, part in enumerate(request.parts):
            try:
                self._give(request, part)
            except HandOverError:
                raise
            except BaseException as error:
                if not number:
                    raise
                for left in request.parts[number:]:
                    self._fail(request, left, error)
                return

    def _give(self, request: InFlightRequest, part: InFlightRequest) -> None:
        if part.replica is None:
            part.replica = self._choose(part.sequence is not None)
            if part.sequence is not None:
                self._sequences[part.sequence] = [(part.replica, None)]
        part.waiting, part.done = self._size, partial(self._ended, request)
        with self._lock:
            self._at_work[part.replica] += 1
        try:
            self._replicas[part.replica].put(part)
        except BaseException:
            part.done = nothing_to_do
            self._leave(part.replica)
            raise

    def _choose(self, stays: bool) -> int:
        """The replica with the least work for its share: requests in flight, and for one that `stays` also sequences.

        Sequences are often idle when others begin: by requests alone, all would stay on the first replica.
        """
        load = Counter(dict(enumerate(self._at_work)))
        if stays:
            load.update(replica for division in list(self._sequences.values()) for replica, _ in division)
        return min(range(len(self._replicas)), key=lambda replica: (load[replica] + 1) / self._shares[replica])

    def _leave(self, replica: int) -> None:
        with self._lock:
            self._at_work[replica] -= 1

    def _ended(self, request: InFlightRequest, part: InFlightRequest) -> None:
        """Finish a part on all ranks of its replica."""
        part.done = nothing_to_do  # it refers to the request, and the request to it
        assert part.replica is not None
        self._leave(part.replica)
        for rank, execution in part.executions.items():
            request.finish(part.replica * self._size + rank, {}, execution, part.error)

    def _fail(self, request: InFlightRequest, part: InFlightRequest, error: BaseException) -> None:
        """Finish a part that no replica got with this error."""
        assert part.replica is not None
        for rank in range(self._size):
            request.finish(part.replica * self._size + rank, {}, NEVER, error)

    def forget(self, sequence: int, reusable: bool) -> None:
        division = self._sequences.pop(sequence, None)
        # Any replica may hold a sum of adapters.
        for replica in range(len(self._replicas)) if division is None else [replica for replica, _ in division]:
            self._replicas[replica].forget(sequence, reusable)

    def watch(self, future: Future[InFlightRequest] | None, request: InFlightRequest) -> None:
        """See Workers. A caller can read one replica's answers only: with several parts, other threads read them."""
        for part in request.parts:
            if part.replica is not None:
                self._replicas[part.replica].watch(future if len(request.parts) == 1 else None, part)

    def start(self) -> None:
        for number, ranks in enumerate(self._replicas):
            try:
                ranks.start()
            except BaseException as error:
                for other in self._replicas[:number]:
                    other.abort(error)
                    other.put(None)
                    if not other.join(PATIENCE):
                        other.stop()
                    other.clear()
                raise

    def wait_loaded(self) -> None:
        for ranks in self._replicas:
            ranks.wait_loaded()

    @property
    def notes(self) -> list[str]:
        return list(dict.fromkeys(note for ranks in self._replicas for note in ranks.notes))

    def device_memory(self) -> list[RankMemory]:
        return [memory for ranks in self._replicas for memory in ranks.device_memory()]

    def bring_in(self) -> None:
        for ranks in self._replicas:
            ranks.bring_in()

    def abort(self, error: BaseException) -> None:
        for ranks in self._replicas:
            ranks.abort(error)

    def stop(self) -> None:
        for ranks in self._replicas:
            ranks.stop()

    def join(self, patience: float) -> bool:
        deadline = time.monotonic() + patience
        return all(ranks.join(max(0.0, deadline - time.monotonic())) for ranks in self._replicas)

    def clear(self) -> None:
        for ranks in self._replicas:
            ranks.clear()


def _part(
    request: InFlightRequest, replica: int | None, feeds: Mapping[str, Feed], initial: Mapping[str, Array | Zeros]
) -> InFlightRequest:
    """A replica's part of a request, with these feeds and initial states."""
    return InFlightRequest(
        feeds,
        sequence=request.sequence,
        initial=initial,
        in_place=request.in_place,
        after=request.after,
        growth=request.growth,
        on_device=request.on_device,
        adapters=request.adapters,
        submitted=request.submitted,
        cancellation=request.cancellation,
        replica=replica,
    )
