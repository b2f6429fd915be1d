"""Several answers to a question, of which one fails. The other tests of answers are in test_openai.py."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Generator
from importlib.util import find_spec
from types import SimpleNamespace
from typing import Any

import pytest

from splitc.runtime.errors import EngineError
from splitc.runtime.serving.openai_requests import Asked
from tests.conftest import until

pytestmark = pytest.mark.skipif(find_spec("starlette") is None, reason="needs starlette")


def test_first_failure_is_told_and_ends_the_other_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    from splitc.runtime.serving.openai_answers import Writer

    ended = []

    def begin(writer: Writer, asked: Asked, prompt: Any, number: int, reply: Any) -> Generator[str, None, None]:
        try:
            for count in itertools.count():
                if number == 0 and count == 3:
                    raise EngineError("the engine failed")
                yield "w"
        finally:
            ended.append(number)

    async def goes_on() -> bool:
        return False

    monkeypatch.setattr(Writer, "_begin", begin)
    monkeypatch.setattr(Writer, "_read_prompt", lambda *_: SimpleNamespace(tokens=[1]))
    served: Any = SimpleNamespace(
        need_session=lambda: SimpleNamespace(in_flight=4), serving=SimpleNamespace(most_sequences=4)
    )
    writer = Writer("chat", served, SimpleNamespace(), lambda: None)  # type: ignore[arg-type]
    request: Any = SimpleNamespace(is_disconnected=goes_on)
    asked: Any = SimpleNamespace(choices=3, likeliest=None, stream=False)
    with pytest.raises(EngineError, match="the engine failed"):
        asyncio.run(writer.answer(asked, True, request))
    until(lambda: sorted(ended) == [0, 1, 2])
    writer.close()
