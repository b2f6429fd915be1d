"""Results that are still to come."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, wait
from typing import TypeVar

S = TypeVar("S")
T = TypeVar("T")


def in_order(futures: Iterable[Future[T]], most: int) -> Iterator[T]:
    """Yield the results in their order. At most `most` of them are pending at a time."""
    pending: deque[Future[T]] = deque()
    try:
        for each in futures:
            pending.append(each)
            if len(pending) >= most:
                yield pending.popleft().result()
        while pending:
            yield pending.popleft().result()
    finally:
        # A caller that stops reading leaves at most these, and they are waited for here, not by whoever comes next.
        wait(pending)


def then(future: Future[S], function: Callable[[S], T]) -> Future[T]:
    """A future of what the function makes of another future's result."""
    result: Future[T] = Future()
    result.set_running_or_notify_cancel()  # it can't be cancelled: the ranks may be at it

    def done(finished: Future[S]) -> None:
        try:
            result.set_result(function(finished.result()))
        except BaseException as error:  # the one who waits for the result gets it
            result.set_exception(error)

    future.add_done_callback(done)
    return result
