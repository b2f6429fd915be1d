"""Progress of long work, for a listener: the command line's bars."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from threading import Lock
from typing import TypeVar

T = TypeVar("T")
# Takes what is done, how much of it, and how much there is.
Listener = Callable[[str, int, int], None]


class Bytes(int):
    """A number of bytes, which is shown as such."""


_listener: ContextVar[Listener | None] = ContextVar("listener", default=None)


def counted(what: str, items: Sequence[T]) -> Iterator[T]:
    """The items; the listener is told as each one is done. `what` names them: `candidates`."""
    tell = _listener.get() or (lambda *_: None)
    tell(what, 0, len(items))
    for number, item in enumerate(items):
        yield item
        tell(what, number + 1, len(items))


def counting(what: str, total: int) -> Callable[[int], None]:
    """A function for any thread to say how much more of `total` is done. The listener is this thread's."""
    listener, lock, done = _listener.get(), Lock(), 0

    def add(more: int) -> None:
        nonlocal done
        with lock:
            done += more
            if listener is not None:
                listener(what, done, total)

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
