"""Answers to OpenAI's requests: which model is asked, what it writes, and what a client gets that goes away or errs."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Coroutine, Generator, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse

from splitc.runtime.errors import MisuseError
from splitc.runtime.files.explained import explained
from splitc.runtime.serving.openai_replies import Reply, card, failure, failure_event
from splitc.runtime.serving.openai_requests import Asked, RequestError, read_asked
from splitc.runtime.serving.served_package import ServedPackage, is_clients_fault
from splitc.runtime.serving.texts import Question, Texts, TooLongError, Written
from splitc.runtime.serving.tool_calls import Message, read_calls, why_no_tools
from splitc.runtime.threads.futures import Executor


class UnknownModelError(MisuseError):
    """A request names a model that the server does not have."""


class BusyError(Exception):
    """The model is already writing the most answers that it takes."""


@dataclass(frozen=True)
class Prompt:
    """What an answer follows: tokens, and for a chat their text. `likeliest` and `tools` are the request's."""

    tokens: Sequence[int]
    text: str
    likeliest: int | None
    tools: Sequence[Mapping[str, Any]] = ()


class Writer:
    """A loaded package that writes answers. `progressed` is called with each token, and when an answer ends."""

    def __init__(self, name: str, served: ServedPackage, texts: Texts, progressed: Callable[[], None]) -> None:
        self._name, self._served, self._texts, self._progressed = name, served, texts, progressed
        # Each thread makes a token of an answer, and then perhaps one of another.
        self._threads = Executor(served.need_session().in_flight, "splitc writes")
        self._answers = 0

    def close(self) -> None:
        """Take no more requests. Answers that are being written end with their session."""
        self._threads.shutdown(wait=False)

    async def answer(self, asked: Asked, chat: bool, request: Request) -> Response:
        """The answer to a request, whole or as a stream. Raises SplitcError for what can't be answered."""
        prompt = await self._in_thread(self._read_prompt, asked, chat)
        written = [Written() for _ in range(asked.choices)]
        reply = Reply(self._name, chat, len(prompt.tokens), written, asked.likeliest is not None)
        answers = [self._write(asked, prompt, number, reply) for number in range(len(written))]
        try:
            # What can't be answered fails here, before an answer begins.
            texts = [await anext(pieces, "") for pieces in answers]
            if asked.stream:
                with_usage = asked.stream_options is not None and asked.stream_options.include_usage
                stream = self._stream(list(zip(texts, answers, strict=True)), prompt, reply, with_usage)
                return StreamingResponse(stream, media_type="text/event-stream")
            await _all(self._finish(texts, number, pieces, request) for number, pieces in enumerate(answers))
            return JSONResponse(reply.whole([self._message(prompt, text) for text in texts]))
        except BaseException:
            for pieces in answers:
                await pieces.aclose()
            raise

    async def _finish(self, texts: list[str], number: int, pieces: AsyncGenerator[str, None], request: Request) -> None:
        """Collect the rest of an answer, unless the client disconnects."""
        async for piece in pieces:
            texts[number] += piece
            if await request.is_disconnected():
                await pieces.aclose()

    def _read_prompt(self, asked: Asked, chat: bool) -> Prompt:
        likeliest, tools = asked.likeliest, asked.offered
        if not chat:
            text = asked.prompt
            return Prompt(self._texts.read_text(text) if isinstance(text, str) else text, "", likeliest)
        if tools and (why := why_no_tools(self._texts.templates)):
            raise RequestError("tools", f"'tools' can't be used here: {why}")
        text = self._texts.write_chat(asked.conversation(), tools)
        return Prompt(self._texts.read_text(text, special=False), text, likeliest, tools)

    def _message(self, prompt: Prompt, text: str) -> Message:
        if not prompt.tools:
            return Message(text)
        return read_calls(self._texts.templates, prompt.text, text, prompt.tools)

    async def _stream(
        self, answers: Sequence[tuple[str, AsyncGenerator[str, None]]], prompt: Prompt, reply: Reply, with_usage: bool
    ) -> AsyncGenerator[bytes, None]:
        """The events of answers that have begun with texts, one answer after the other.

        Where tools are offered, an answer is one piece: only its end tells whether it is a call.
        """
        try:
            for number, (text, pieces) in enumerate(answers):
                message = None
                if prompt.tools:
                    message = self._message(prompt, text + "".join([piece async for piece in pieces]))
                    text = message.text
                yield reply.piece(number, text, first=True)
                async for piece in pieces:
                    if piece:
                        yield reply.piece(number, piece, first=False)
                yield reply.end(number, message)
            for event in reply.ends(with_usage):
                yield event
        except Exception as error:
            yield failure_event(_say(error))
        finally:
            for _, pieces in answers:
                await pieces.aclose()

    async def _write(self, asked: Asked, prompt: Prompt, number: int, reply: Reply) -> AsyncGenerator[str, None]:
        """Yield the answer in pieces. If the reader stops, its sequence ends after the current token."""
        most = self._served.serving.most_sequences
        if self._answers >= most:
            raise BusyError(f"{most} answers are being written, the limit (most_sequences): ask again later")
        self._answers += 1
        step = None
        try:
            stream = await self._in_thread(self._begin, asked, prompt, number, reply)
            while True:
                step = self._threads.submit(next, stream, None)
                piece = await asyncio.wrap_future(step)
                self._progressed()
                if piece is None:
                    return
                yield piece
        finally:
            self._answers -= 1
            if step is not None:
                # Nothing can be awaited here: the client may be gone, and this task be cancelled.
                step.add_done_callback(lambda _: self._end(stream))

    def _begin(self, asked: Asked, prompt: Prompt, number: int, reply: Reply) -> Generator[str, None, None]:
        session = self._served.need_session()
        seed = None if asked.seed is None else asked.seed + number
        sampling = self._texts.sampling(asked.temperature, asked.top_p, asked.top_k, seed)
        most = self._texts.count(session, len(prompt.tokens), asked.most)
        question = Question(prompt.tokens, most, sampling, asked.stops, prompt.likeliest, bool(prompt.tools))
        return self._texts.write(session, question, reply.written[number])

    def _end(self, stream: Generator[str, None, None]) -> None:
        stream.close()
        self._progressed()

    async def _in_thread(self, work: Callable[..., Any], *arguments: Any) -> Any:
        return await asyncio.get_running_loop().run_in_executor(self._threads, partial(work, *arguments))


class Writers:
    """The models of a server that write answers, by name: a request names one of them."""

    def __init__(self) -> None:
        self._loaded: dict[str, Writer] = {}

    def add(self, name: str, writer: Writer) -> None:
        """Offer a model. It replaces one with the same name."""
        self._loaded[name] = writer

    def remove(self, name: str, writer: Writer) -> None:
        """Offer a model no longer."""
        if self._loaded.get(name) is writer:
            del self._loaded[name]

    def list_models(self) -> Response:
        """The offered models."""
        return JSONResponse({"object": "list", "data": [card(name) for name in self._loaded]})

    def show_model(self, name: str) -> Response:
        """The offered model with this name."""
        try:
            self._find(name)
        except UnknownModelError as error:
            return _refusal(error)
        return JSONResponse(card(name))

    async def respond(self, request: Request, wanted: str) -> Response:
        """Answer a request, which has the field `wanted`."""
        try:
            asked = read_asked(await request.body(), wanted)
            return await self._find(asked.model).answer(asked, wanted == "messages", request)
        except Exception as error:
            return _refusal(error)

    def _find(self, name: str) -> Writer:
        if name not in self._loaded:
            raise UnknownModelError(f"there is no model '{name}': there are {', '.join(sorted(self._loaded))}")
        return self._loaded[name]


WRITERS = Writers()


async def _all(work: Iterable[Coroutine[Any, Any, None]]) -> None:
    """Wait for all of it. The first error ends the rest, and is raised when nothing of it runs any more."""
    tasks = [asyncio.ensure_future(one) for one in work]
    try:
        await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)


def _refusal(error: Exception) -> Response:
    """The answer to a request that failed."""
    if isinstance(error, UnknownModelError):
        return JSONResponse(failure(str(error), "invalid_request_error", "model_not_found", "model"), 404)
    if isinstance(error, BusyError):
        return JSONResponse(failure(str(error), "rate_limit_error"), 429)
    if is_clients_fault(error):
        code = "context_length_exceeded" if isinstance(error, TooLongError) else None
        field = error.field if isinstance(error, RequestError) else None
        return JSONResponse(failure(_say(error), "invalid_request_error", code, field), 400)
    return JSONResponse(failure(_say(error), "server_error"), 500)


def _say(error: Exception) -> str:
    return str(explained(error) or repr(error))
