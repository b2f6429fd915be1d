"""Helpers for futures."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import FIRST_EXCEPTION, Future, wait
from typing import Any, TypeVar

from splitc.runtime.counted import counting

S = TypeVar("S")
T = TypeVar("T")


def in_order(futures: Iterable[Future[T]], most: int) -> Iterator[T]:
    """Yield the futures' results in order. At most `most` futures are pending at a time."""
    pending: deque[Future[T]] = deque()
    try:
        for each in futures:
            pending.append(each)
            if len(pending) >= most:
                yield pending.popleft().result()
        while pending:
            yield pending.popleft().result()
    finally:
        # If the caller stops early, wait for the pending ones here, so that no later request has to.
        wait(pending)


def first_error(futures: Iterable[Future[Any]], what: str | None = None) -> BaseException | None:
    """Wait until all futures are done, or one has failed. Returns its error, None if all went well.

    Those that are done are counted, if `what` they do is given.
    """
    every = list(futures)
    if what is not None:
        add = counting(what, len(every))
        for future in every:
            future.add_done_callback(lambda _: add(1))
    done, _ = wait(every, return_when=FIRST_EXCEPTION)
    return next((error for future in done if (error := future.exception()) is not None), None)


def then(future: Future[S], function: Callable[[S], T]) -> Future[T]:
    """A future of the function's result on another future's result."""
    result: Future[T] = Future()
    result.set_running_or_notify_cancel()  # it can't be cancelled, since ranks may be running it

    def done(finished: Future[S]) -> None:
        try:
            result.set_result(function(finished.result()))
        except BaseException as error:  # whoever waits for the result gets it
            result.set_exception(error)

    future.add_done_callback(done)
    return result
