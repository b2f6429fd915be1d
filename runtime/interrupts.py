"""Ctrl-C and SIGTERM: at a time when they can do no harm, and not at one when they get lost."""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any


@contextmanager
def later_interrupts() -> Iterator[Callable[[], bool]]:
    """Let an interrupt (SIGINT) come at the end of the block. The function that it gives says whether one waits.

    Python runs its handlers on the main thread, so on others nothing is to be done.
    """
    handler = signal.getsignal(signal.SIGINT)
    if threading.current_thread() is not threading.main_thread() or not callable(handler):
        yield lambda: False
        return
    came: list[tuple[int, Any]] = []
    signal.signal(signal.SIGINT, lambda number, frame: came.append((number, frame)))
    try:
        yield lambda: bool(came)
    finally:
        signal.signal(signal.SIGINT, handler)
        if came:
            handler(*came[0])


# Seconds after which a lost signal comes again.
AGAIN = 0.01


def keep_signals() -> None:
    """Let a signal come again whose exception Python drops: one that comes while an object is being freed.

    From now on, for the whole process.
    """
    if not isinstance(sys.unraisablehook, _Dropped):
        sys.unraisablehook = _Dropped(sys.unraisablehook)


@dataclass(frozen=True)
class _Dropped:
    """Gets what Python drops. Other than signals goes to the hook before it."""

    others: Callable[[sys.UnraisableHookArgs], Any]

    def __call__(self, what: sys.UnraisableHookArgs) -> None:
        number = {SystemExit: signal.SIGTERM, KeyboardInterrupt: signal.SIGINT}.get(what.exc_type)
        if number is None:
            self.others(what)
            return
        again = threading.Timer(AGAIN, os.kill, [os.getpid(), number])
        again.daemon = True
        again.start()
