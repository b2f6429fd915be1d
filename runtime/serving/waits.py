"""The time to wait before a package is loaded again if its sessions keep breaking."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

from splitc.runtime.errors import EngineError

# Seconds of the longest wait. After a session that lived as long, counting starts anew. Both here are choices: a model
# that always breaks is loaded at least six times an hour, in case what broke it is gone, and one that loads in no time
# not more than once a second.
LONGEST = 600.0
# The least seconds of the first wait.
LEAST = 1.0


class Waits:
    """The waits before a package is loaded again: none after the first break, then twice as long after each.

    The first wait is as long as loading takes, so that a package that crashes on each request is loading for at most
    half of the time.
    """

    def __init__(self) -> None:
        self._breaks = 0
        self._began = self._loaded = time.monotonic()
        # Until when it is not loaded, and why; None while the session lives.
        self._until: float | None = None
        self._why = ""

    @contextmanager
    def loading(self) -> Iterator[None]:
        """The block loads the package. A failure counts as another break."""
        self._began = time.monotonic()
        try:
            yield
        except Exception as error:
            self._loaded, self._until = time.monotonic(), None
            self._note(str(error))
            raise
        self._loaded, self._until = time.monotonic(), None

    def check(self, why: str) -> None:
        """Note that the session is unusable (`why`). Raises EngineError until the package may be loaded again."""
        if self._until is None:
            self._note(why)
        left = (self._until or 0.0) - time.monotonic()
        if left > 0:
            raise EngineError(
                f"the model broke {self._breaks} times in a row, so it is loaded again by the first request after "
                f"{left:.0f} s. The last time: {self._why}"
            )

    def _note(self, why: str) -> None:
        """Note another break."""
        now = time.monotonic()
        self._breaks = 1 if now - self._loaded > LONGEST else self._breaks + 1
        wait = max(LEAST, self._loaded - self._began) * 2 ** min(self._breaks - 2, 10) if self._breaks > 1 else 0.0
        self._until, self._why = now + min(wait, LONGEST), why
