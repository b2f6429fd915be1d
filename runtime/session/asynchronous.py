"""Requests for programs of asyncio, which is imported with the first of them: not all programs wait for it."""

from __future__ import annotations

from collections import deque
from collections.abc import AsyncIterator, Callable, Iterable, Mapping
from concurrent.futures import Future
from typing import TYPE_CHECKING

import numpy.typing as npt

from splitc.runtime.arrays.array import Array

if TYPE_CHECKING:
    import asyncio

Feeds = Mapping[str, npt.ArrayLike]
# Begins a request, and waits while as many as may be are in flight.
Submit = Callable[[Feeds], Future[dict[str, Array]]]


async def run(submit: Submit, feeds: Feeds) -> dict[str, Array]:
    """A request's outputs. The loop goes on while it waits for others, and while it runs.

    A task that is cancelled cancels the request, if no rank has begun it.
    """
    import asyncio

    begun = asyncio.get_running_loop().run_in_executor(None, submit, feeds)
    try:
        future = await asyncio.shield(begun)
    except asyncio.CancelledError:
        begun.add_done_callback(_cancel)
        raise
    return await asyncio.wrap_future(future)


def _cancel(begun: asyncio.Future[Future[dict[str, Array]]]) -> None:
    """Cancel a request that nobody waits for any more."""
    if not begun.cancelled() and begun.exception() is None:
        begun.result().cancel()


async def run_each(submit: Submit, feeds: Iterable[Feeds], in_flight: int) -> AsyncIterator[dict[str, Array]]:
    """The outputs of requests in their order, with so many in flight. Feeds are taken lazily.

    The first that fails ends it with its error; the others are cancelled, if no rank has begun them.
    """
    import asyncio

    tasks: deque[asyncio.Task[dict[str, Array]]] = deque()
    try:
        for one in feeds:
            tasks.append(asyncio.create_task(run(submit, one)))
            await asyncio.sleep(0)  # it begins before the next one does
            if len(tasks) >= in_flight:
                yield await tasks.popleft()
        while tasks:
            yield await tasks.popleft()
    finally:
        for task in tasks:
            task.cancel()
