"""The threads that are in callbacks of requests: they must not wait for what only they could complete."""

from __future__ import annotations

import threading


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
