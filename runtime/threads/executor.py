"""A pool of threads that a signal can't break."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, TypeVar

from splitc.runtime.threads.futures import then
from splitc.runtime.threads.interrupts import later_interrupts

T = TypeVar("T")


class Executor(ThreadPoolExecutor):
    """A pool that no signal interrupts while it starts a thread.

    The pool would not know of that thread, and Python's exit would wait for it for ever. It would also wait for a
    thread whose future was left locked, so the futures are Answers.
    """

    def submit(self, fn: Callable[..., T], /, *args: Any, **kwargs: Any) -> Future[T]:
        with later_interrupts():
            return then(super().submit(fn, *args, **kwargs), lambda made: made)

    def map(self, fn: Callable[..., T], *iterables: Iterable[Any], **options: Any) -> Iterator[T]:
        with later_interrupts():  # all begin, or none: they may wait for each other
            return super().map(fn, *iterables, **options)
