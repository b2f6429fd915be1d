"""Progress of long work, for a listener: the command line's bars."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from functools import partial
from threading import Lock
from typing import TypeVar

T = TypeVar("T")
# Takes what is done, how much of it, and how much there is.
Listener = Callable[[str, float, int], None]


class Bytes(int):
    """A number of bytes, which is shown as such."""


_listener: ContextVar[Listener | None] = ContextVar("listener", default=None)


def telling(what: str) -> Callable[[float, int], None]:
    """A function for any thread to report the amount done, and the total, to this thread's listener."""
    return partial(_listener.get() or (lambda *_: None), what)


@contextmanager
def doing(what: str) -> Iterator[None]:
    """Report the beginning and the end of the block to the listener."""
    tell = telling(what)
    tell(0, 1)
    yield
    tell(1, 1)


def counted(what: str, items: Sequence[T]) -> Iterator[T]:
    """Yield the items, and report each to the listener when it is done. `what` names them: `candidates`."""
    tell = telling(what)
    tell(0, len(items))
    for number, item in enumerate(items):
        yield item
        tell(number + 1, len(items))


def counting(what: str, total: int) -> Callable[[int], None]:
    """A function for any thread to report how much more of `total` is done, to this thread's listener."""
    tell, lock, done = telling(what), Lock(), 0

    def add(more: int) -> None:
        nonlocal done
        with lock:
            done += more
            tell(done, total)

    if total:
        add(0)
    return add


@contextmanager
def listening(listener: Listener) -> Iterator[None]:
    """A context in which a listener gets the progress of this thread, and of threads that work for it."""
    token = _listener.set(listener)
    try:
        yield
    finally:
        _listener.reset(token)
