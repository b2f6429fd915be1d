"""Ctrl-C at a time when it can do no harm."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
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
