"""Requests for asyncio programs. asyncio is imported with the first of them, since not all programs need it."""

from __future__ import annotations

from collections import deque
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable, Mapping
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any

import numpy.typing as npt

from splitc.runtime.arrays.array import Array

if TYPE_CHECKING:
    import asyncio

Feeds = Mapping[str, npt.ArrayLike]


async def run(begin: Callable[[], Future[dict[str, Array]]], withdraw: Callable[[], bool]) -> dict[str, Array]:
    """A request's outputs. The event loop is not blocked while another thread waits to `begin` it, nor while it runs.

    A task that is cancelled withdraws the request, which has an effect if no rank has begun it.
    """
    import asyncio

    begun = asyncio.get_running_loop().run_in_executor(None, begin)
    try:
        future = await asyncio.shield(begun)
    except asyncio.CancelledError:
        withdraw()
        begun.add_done_callback(_drop)
        raise
    return await asyncio.wrap_future(future)


def _drop(begun: asyncio.Future[Future[dict[str, Array]]]) -> None:
    """Retrieve the error of an abandoned request, or asyncio would report it."""
    if not begun.cancelled():
        begun.exception()


async def run_each(
    run: Callable[[Feeds], Coroutine[Any, Any, dict[str, Array]]], feeds: Iterable[Feeds], in_flight: int
) -> AsyncIterator[dict[str, Array]]:
    """The outputs of requests in order, with `in_flight` of them at a time. Feeds are taken lazily.

    The first failed request ends the iteration with its error; the others are cancelled, if no rank has begun them.
    """
    import asyncio

    tasks: deque[asyncio.Task[dict[str, Array]]] = deque()
    try:
        for one in feeds:
            tasks.append(asyncio.create_task(run(one)))
            await asyncio.sleep(0)  # it begins before the next one does
            if len(tasks) >= in_flight:
                yield await tasks.popleft()
        while tasks:
            yield await tasks.popleft()
    finally:
        for task in tasks:
            task.cancel()
