"""Requests in asyncio."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from splitc.runtime import FeedError, Session
from tests.conftest import decoder_feeds, until
from tests.helpers.engines import hold_engines


def test_requests_are_awaited(package: Path) -> None:
    """Many at once, more than may be in flight: each has its own answer, in order."""
    questions = [decoder_feeds(1, 1 + number % 5) for number in range(20)]

    async def ask(session: Session) -> tuple[list[Any], list[Any]]:
        together = await asyncio.gather(*(session.run_async(feeds) for feeds in questions))
        in_order = [outputs async for outputs in session.map_async(iter(questions), in_flight=3)]
        return together, in_order

    with Session(package, in_flight=4) as session:
        expected = [session.run(feeds)["logits"] for feeds in questions]
        for answers in asyncio.run(ask(session)):
            for one, other in zip(answers, expected, strict=True):
                np.testing.assert_array_equal(one["logits"], other)


def test_errors_and_what_comes_after(package: Path) -> None:
    async def ask(session: Session) -> None:
        with pytest.raises(FeedError, match="no array for the input"):
            await session.run_async({})
        with pytest.raises(FeedError):
            async for _ in session.map_async([decoder_feeds(), {}, decoder_feeds()]):
                pass
        assert "logits" in await session.run_async(decoder_feeds())

    with Session(package) as session:
        asyncio.run(ask(session))


def test_a_cancelled_task_cancels_its_request(package: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """While it waits for a thread or a slot, and while the request waits for its turn. The session goes on."""

    async def ask(session: Session) -> int:
        tasks = [asyncio.create_task(session.run_async(decoder_feeds()))]
        await asyncio.to_thread(begun.wait, 10)  # or else another one may begin, which can't be cancelled then
        tasks += [asyncio.create_task(session.run_async(decoder_feeds())) for _ in range(49)]
        await asyncio.sleep(0.05)
        for task in tasks[1:]:
            task.cancel()
        with pytest.raises(asyncio.TimeoutError):
            await asyncio.wait_for(session.run_async(decoder_feeds()), timeout=1e-6)
        go_on.set()
        ended = await asyncio.gather(*tasks, return_exceptions=True)
        return sum(isinstance(each, asyncio.CancelledError) for each in ended)

    with Session(package, in_flight=2) as session:
        begun, go_on = hold_engines(monkeypatch)
        assert asyncio.run(ask(session)) == 49
        until(lambda: session.metrics.in_flight == 0)
        assert (session.metrics.done, session.metrics.failed) == (1, 0)
        assert "logits" in session.run(decoder_feeds())
