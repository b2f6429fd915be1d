"""The threads that are in callbacks of requests: they must not wait for what only they could complete."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager


class Callbacks(threading.local):
    """Whether this thread is setting a request's result, and so may be in one of its callbacks."""

    active = False

    @contextmanager
    def entered(self) -> Iterator[None]:
        """A context in which this thread counts as in a callback."""
        before, self.active = self.active, True
        try:
            yield
        finally:
            self.active = before
