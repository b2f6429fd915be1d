"""The frequency of Python's garbage collections, for all threads."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from threading import Lock

# Python looks for garbage after so many new objects. At its default of 700, that takes a third of the time of a plan,
# whose hundreds of thousands of nodes and values all stay.
GARBAGE_AFTER = 500_000

_lock = Lock()
# How often it did so before, once for each caller that is inside.
_before: list[tuple[int, int, int]] = []


@contextmanager
def rare_garbage() -> Iterator[None]:
    """A context with rare garbage collections. If they are disabled or rarer already, nothing changes."""
    with _lock:
        _before.append(_before[0] if _before else gc.get_threshold())
        young, *others = _before[0]
        gc.set_threshold(max(young, GARBAGE_AFTER) if young else 0, *others)
    try:
        yield
    finally:
        with _lock:
            first = _before.pop()
            if not _before:
                gc.set_threshold(*first)
