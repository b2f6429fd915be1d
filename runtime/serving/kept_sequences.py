"""Sequences of a served package, by the ids that clients give them."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Mapping
from concurrent.futures import Executor, Future
from dataclasses import dataclass, field

from splitc.runtime.adapters.asked import read_names
from splitc.runtime.arrays.array import Array
from splitc.runtime.errors import FeedError, MisuseError
from splitc.runtime.requests.sequence import StateSequence
from splitc.runtime.session.session import Session

Answer = Future[dict[str, Array]]


@dataclass(frozen=True)
class SequenceStep:
    """The sequence of a request, and whether it is the first or the last of it."""

    id: int | str
    start: bool = False
    end: bool = False


@dataclass
class _Kept:
    """A sequence, its adapters, its waiting requests, and when the last one ended. `working` says whether one runs."""

    sequence: StateSequence
    adapter: str
    waiting: deque[tuple[Mapping[str, Array], bool, Answer]] = field(default_factory=deque)
    working: bool = False
    used: float = field(default_factory=time.monotonic)


class KeptSequences:
    """The open sequences of a session. Requests of one sequence run in order, those of several at the same time.

    A sequence is closed with its last request, when it starts again, when its engine fails, and when it was idle for
    `idle_seconds`. At most `most` are open at a time, if given.
    """

    def __init__(
        self, session: Session, pool: Executor, capacity: int | None, idle_seconds: float, most: int | None
    ) -> None:
        self._session, self._pool = session, pool
        self._capacity, self._idle, self._most = capacity, idle_seconds, most
        self._kept: dict[int | str, _Kept] = {}
        self._lock = threading.Lock()
        self._ended = threading.Event()
        threading.Thread(target=self._watch, name="splitc ends sequences", daemon=True).start()

    def submit(self, step: SequenceStep, feeds: Mapping[str, Array], adapter: str = "") -> Answer:
        """Run a request of a sequence after the earlier ones. The arrays must not change meanwhile.

        Raises FeedError for a sequence that has not begun, MisuseError if too many are open, and for another `adapter`
        than the sequence began with.
        """
        answer: Answer = Future()
        with self._lock:
            kept = self._begin(step.id, adapter) if step.start else self._kept.get(step.id)
            if kept is None:
                raise FeedError(
                    f"sequence {step.id} is not open: mark its first request as the start. It may have ended by a "
                    f"failure, or after {self._idle:g} s without a request"
                )
            if adapter not in ("", kept.adapter):
                began = f"'{kept.adapter}'" if kept.adapter else "none"
                raise MisuseError(f"sequence {step.id} began with the adapter {began}, and keeps it: not '{adapter}'")
            kept.waiting.append((feeds, step.end, answer))
            if not kept.working:
                self._start_work(step, kept)
            if step.end:
                del self._kept[step.id]
        return answer

    def _start_work(self, step: SequenceStep, kept: _Kept) -> None:
        """Have the pool run a sequence's requests. If it can't start a thread, this request is removed again."""
        kept.working = True
        try:
            self._pool.submit(self._work, step.id, kept)
        except BaseException:
            kept.working = False
            kept.waiting.clear()
            if step.start:
                self._kept.pop(step.id).sequence.close()
            raise

    def _begin(self, key: int | str, adapter: str) -> _Kept:
        """A new sequence, which replaces one with the same id."""
        if (before := self._kept.pop(key, None)) is not None:
            before.sequence.close()
        if self._most is not None and len(self._kept) >= self._most:
            raise MisuseError(f"{self._most} sequences are open, the limit (most_sequences): end one of them")
        sequence = self._session.start(self._capacity, adapters=read_names(adapter))
        kept = self._kept[key] = _Kept(sequence, adapter)
        return kept

    def _work(self, key: int | str, kept: _Kept) -> None:
        """Run the requests of a sequence until none waits."""
        while True:
            with self._lock:
                kept.used = time.monotonic()
                if not kept.waiting:
                    kept.working = False
                    return
                feeds, last, answer = kept.waiting.popleft()
            if answer.set_running_or_notify_cancel():  # or else the client has gone on without it
                try:
                    outputs = kept.sequence.run(feeds)
                except BaseException as error:  # whoever waits for the answer gets it
                    if not kept.sequence.usable:
                        self._fail(key, kept)
                    answer.set_exception(error)
                else:
                    answer.set_result(outputs)
            if last:
                kept.sequence.close()

    def _fail(self, key: int | str, kept: _Kept) -> None:
        """Free a sequence whose states are lost."""
        with self._lock:
            if self._kept.get(key) is kept:
                del self._kept[key]
        kept.sequence.close()

    def _watch(self) -> None:
        # So a sequence ends a quarter of its idle time late at most, and the thread wakes once a second at least.
        while not self._ended.wait(min(self._idle / 4, 1.0)):
            self._end_idle(time.monotonic())

    def _end_idle(self, now: float) -> None:
        """Close the sequences that have been idle for too long."""
        with self._lock:
            idle = [key for key, kept in self._kept.items() if not kept.working and now - kept.used >= self._idle]
            for key in idle:
                self._kept.pop(key).sequence.close()

    def close(self) -> None:
        """Close all sequences."""
        self._ended.set()
        with self._lock:
            for kept in self._kept.values():
                kept.sequence.close()
            self._kept.clear()
