"""Which threads are in callbacks of requests: those must not wait for what only they themselves would end."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager


class Callbacks(threading.local):
    """Whether this thread gives a request its result, and so may be in a function that was to be called then."""

    active = False

    @contextmanager
    def entered(self) -> Iterator[None]:
        """Meanwhile, this thread is in callbacks."""
        before, self.active = self.active, True
        try:
            yield
        finally:
            self.active = before
