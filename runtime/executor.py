"""A pool of threads that a signal can't break."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, TypeVar

from splitc.runtime.interrupts import later_interrupts

T = TypeVar("T")


class Executor(ThreadPoolExecutor):
    """A pool that no signal interrupts while it starts a thread.

    The pool would not know of that thread, which waits for work, and Python would wait for it at its exit, for ever.
    """

    def submit(self, fn: Callable[..., T], /, *args: Any, **kwargs: Any) -> Future[T]:
        with later_interrupts():
            return super().submit(fn, *args, **kwargs)
