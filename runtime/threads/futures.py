"""Futures whose waits signals end, and a pool of threads that a signal can't break."""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import FIRST_EXCEPTION, CancelledError, Future, ThreadPoolExecutor, TimeoutError, wait
from contextlib import suppress
from functools import partial
from typing import Any, TypeVar

from splitc.runtime.threads.interrupts import later_interrupts
from splitc.runtime.threads.progress import counting

S = TypeVar("S")
T = TypeVar("T")


# Seconds between two looks at whether a signal waits. A choice: nobody notices a tenth of a second after Ctrl-C.
LOOK = 0.1


class Awaited(Future[T]):
    """The future of a request. Signals end a wait for it, within LOOK seconds, and never come while its lock is held.

    Python may run a handler between the locking and the block that unlocks. An exception there would leave the lock
    locked, and the rank that has the result would wait for ever.
    """

    def result(self, timeout: float | None = None) -> T:
        """The result. Raises the request's error, or TimeoutError after so many seconds."""
        return self._waited(super().result, timeout)

    def exception(self, timeout: float | None = None) -> BaseException | None:
        """The request's error, or None. Raises TimeoutError after so many seconds."""
        return self._waited(super().exception, timeout)

    def _waited(self, get: Callable[[float | None], S], timeout: float | None) -> S:
        """The result of `get` once the request has ended. Waits for at most `timeout` seconds."""
        end = math.inf if timeout is None else time.monotonic() + timeout
        while True:
            with later_interrupts() as interrupted:
                while not interrupted():
                    try:
                        return get(min(LOOK, max(0.0, end - time.monotonic())))
                    except TimeoutError:
                        if super().done() or time.monotonic() >= end:
                            raise

    def done(self) -> bool:
        """Whether the request has ended."""
        with later_interrupts():
            return super().done()

    def cancel(self) -> bool:
        """Cancel the request if it has not begun. Returns whether it is cancelled."""
        with later_interrupts():
            return super().cancel()

    def add_done_callback(self, fn: Callable[[Future[T]], object]) -> None:
        """Call a function with the future when the request has ended. Future logs what it raises, and goes on.

        That includes SystemExit: it would end a thread that others wait for, and not the program.
        """
        with later_interrupts():
            super().add_done_callback(partial(_called, fn))


def _called(fn: Callable[[Future[T]], object], future: Future[T]) -> None:
    try:
        fn(future)
    except Exception:
        raise
    except BaseException as error:
        raise RuntimeError("a callback of a request can't end the program") from error


def in_order(futures: Iterable[Future[T]], most: int) -> Iterator[T]:
    """Yield the futures' results in order. At most `most` futures are pending at a time."""
    pending: deque[Future[T]] = deque()
    try:
        for future in futures:
            pending.append(future)
            if len(pending) >= most:
                yield pending.popleft().result()
        while pending:
            yield pending.popleft().result()
    finally:
        # If the caller stops early, wait for the pending ones here, so that no later request has to.
        for future in pending:
            with suppress(CancelledError):
                future.exception()


def first_error(futures: Iterable[Future[Any]], what: str | None = None) -> BaseException | None:
    """Wait until all futures are done, or one has failed. Returns its error; None if all succeeded.

    Progress is reported if `what` is given: what the futures do. Signals end the wait, as for an Awaited.
    """
    every = list(futures)
    if what is not None:
        add = counting(what, len(every))
        with later_interrupts():
            for future in every:
                future.add_done_callback(lambda _: add(1))
    while True:
        with later_interrupts() as interrupted:
            while not interrupted():
                done, others = wait(every, LOOK, FIRST_EXCEPTION)
                error = next((error for future in done if (error := future.exception()) is not None), None)
                if error is not None or not others:
                    return error


def _never() -> bool:
    """The default `withdraw`: nothing can be cancelled."""
    return False


class _Following(Awaited[T]):
    """A future that follows another one. `withdraw` cancels the work of that one, and returns whether it could."""

    def __init__(self, withdraw: Callable[[], bool]) -> None:
        super().__init__()
        self.withdraw = withdraw

    def cancel(self) -> bool:
        return super().cancel() if self.withdraw() else self.cancelled()


def then(future: Future[S], function: Callable[[S], T], withdraw: Callable[[], bool] = _never) -> Future[T]:
    """A future of a function's result on another future's result.

    To cancel it, `withdraw` cancels the work of the other one, which then ends with a CancelledError.
    """
    result: _Following[T] = _Following(withdraw)

    def done(finished: Future[S]) -> None:
        result.withdraw = _never  # it may hold what is done
        try:
            made = function(finished.result())
        except CancelledError:
            Awaited.cancel(result)
            result.set_running_or_notify_cancel()
        except BaseException as error:  # whoever waits for the result gets it
            if result.set_running_or_notify_cancel():
                result.set_exception(error)
        else:
            if result.set_running_or_notify_cancel():
                result.set_result(made)

    future.add_done_callback(done)
    return result


class Executor(ThreadPoolExecutor):
    """A pool that no signal interrupts while it starts a thread.

    The pool would not know of that thread, and Python's exit would wait for it for ever. It would also wait for a
    thread whose future was left locked, so the futures are Awaited ones.
    """

    def submit(self, fn: Callable[..., T], /, *args: Any, **kwargs: Any) -> Future[T]:
        with later_interrupts():
            return then(super().submit(fn, *args, **kwargs), lambda made: made)

    def map(self, fn: Callable[..., T], *iterables: Iterable[Any], **options: Any) -> Iterator[T]:
        with later_interrupts():  # all begin, or none: they may wait for each other
            return super().map(fn, *iterables, **options)
