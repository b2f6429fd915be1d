"""Turns of a pipeline's models, which work one at a time, and the threads that are in callbacks of requests."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable

from splitc.runtime.errors import MisuseError


class Callbacks(threading.local):
    """A context in which this thread sets a request's result, and so may be in one of its callbacks: then `active`."""

    active = False
    _depth = 0

    def __enter__(self) -> None:
        self._depth += 1
        self.active = True

    def __exit__(self, *_: object) -> None:
        self._depth -= 1
        self.active = self._depth > 0


# Seconds between two checks whether a session that waits is broken or closed, or a signal has come. A choice: nobody
# notices a tenth of a second, and ten wake-ups a second cost nothing. A turn that comes is noticed at once.
CHECK_EVERY = 0.1


class Turns:
    """Gives the turn to one model at a time, in the order of asking."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._waiting: deque[object] = deque()
        self._owner: Turn | None = None
        # Whether the owner is being brought in.
        self._comes_in = False
        # Of requests of any of these models: requests in flight may wait for them to return.
        self.callbacks = Callbacks()

    def begin(self, turn: Turn, check: Callable[[], None]) -> None:
        """Wait for a model's turn and count its request. `check` raises an error if it need wait no longer."""
        ticket = object()
        with self._changed:
            self._waiting.append(ticket)
            try:
                while not self._may_begin(turn, ticket):
                    if self.callbacks.active:
                        raise MisuseError(
                            "these modules work in turn: while one has requests in flight, a callback can't start "
                            "another's. Submit the request from another thread"
                        )
                    self._changed.wait(CHECK_EVERY)
                    check()
                turn.requests += 1
                had_turn = self._owner is turn
                self._owner = turn
                self._comes_in = not had_turn
            finally:
                self._waiting.remove(ticket)
                self._changed.notify_all()
        if not had_turn:
            self._bring_in(turn)

    def _bring_in(self, turn: Turn) -> None:
        """Copy the model's weights in at the start of its turn. Other requests wait, without holding the lock."""
        came = False
        try:
            turn.bring_in()
            came = True
        finally:
            with self._changed:
                self._comes_in = False
                if not came:
                    turn.requests -= 1
                    self._owner = None
                self._changed.notify_all()

    def _may_begin(self, turn: Turn, ticket: object) -> bool:
        """Whether no other model works or is brought in, and no earlier ticket waits. A callback skips the queue."""
        if self._comes_in or (self._owner is not turn and self._owner is not None and self._owner.requests):
            return False
        return self.callbacks.active or self._waiting[0] is ticket

    def end(self, turn: Turn) -> None:
        """Count the end of a model's request."""
        with self._changed:
            turn.requests -= 1
            self._changed.notify_all()


class Turn:
    """A model's part in `turns`. `requests` counts those at work. `bring_in` is called at the start of its turn."""

    def __init__(self, turns: Turns, bring_in: Callable[[], None]) -> None:
        self.turns = turns
        self.bring_in = bring_in
        self.requests = 0
