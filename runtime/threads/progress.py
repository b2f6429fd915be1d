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
    """A function for any thread to say how much is done, and of how much. The listener is this thread's."""
    return partial(_listener.get() or (lambda *_: None), what)


@contextmanager
def doing(what: str) -> Iterator[None]:
    """The listener is told when the block begins and when it has ended."""
    tell = telling(what)
    tell(0, 1)
    yield
    tell(1, 1)


def counted(what: str, items: Sequence[T]) -> Iterator[T]:
    """The items; the listener is told as each one is done. `what` names them: `candidates`."""
    tell = telling(what)
    tell(0, len(items))
    for number, item in enumerate(items):
        yield item
        tell(number + 1, len(items))


def counting(what: str, total: int) -> Callable[[int], None]:
    """A function for any thread to say how much more of `total` is done. The listener is this thread's."""
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
    """Tell a listener what is counted inside, by this thread and by threads that it gives work to."""
    token = _listener.set(listener)
    try:
        yield
    finally:
        _listener.reset(token)
