"""Long work says how far it is, to whoever listens: the command line's bars."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TypeVar

T = TypeVar("T")
# Takes what is done, how much of it, and how much there is.
Listener = Callable[[str, int, int], None]

_listener: ContextVar[Listener | None] = ContextVar("listener", default=None)


def counted(what: str, items: Sequence[T]) -> Iterator[T]:
    """The items, of each of which the listener hears as it is done. `what` names them: `candidates`."""
    tell = _listener.get() or (lambda *_: None)
    tell(what, 0, len(items))
    for number, item in enumerate(items):
        yield item
        tell(what, number + 1, len(items))


@contextmanager
def listening(listener: Listener) -> Iterator[None]:
    """Have a listener hear of what is counted inside, in this thread."""
    token = _listener.set(listener)
    try:
        yield
    finally:
        _listener.reset(token)
