"""OpenAI's own client talks to a package in MLServer. `make test-serving` runs this."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from splitc.runtime.serving.openai_folder import export_openai
from splitc.runtime.serving.serving_file import Serving
from tests.conftest import DECODER, Array, run_whole
from tests.helpers.folders import write_json
from tests.helpers.greedy import plain_loop
from tests.helpers.servers import Server, counted, ml_server
from tests.helpers.texts import ANSWER, END, USER, words, write_chat_tokenizer

NEEDED = ("mlserver", "openai", "transformers", "jinja2")
pytestmark = pytest.mark.skipif(not all(map(find_spec, NEEDED)), reason=f"needs {', '.join(NEEDED)}")

QUESTION = [{"role": "user", "content": "w5 w17 w33"}]
PROMPT = [USER, 5, 17, 33, ANSWER]
CONTEXT = 3000
TOOLS = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}]
DONE = 'splitc_requests_done_total{model="chat"}'


@pytest.fixture(scope="module")
def server(package: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("openai")
    tokenizer = write_chat_tokenizer(folder / "tokenizer")
    for name in ("chat", "other"):
        serving = Serving("package", threads=1, most_sequences=2 if name == "other" else 64)
        export_openai(package, folder / "models", serving, name=name, tokenizer=tokenizer, context=CONTEXT)
    with ml_server(folder / "models", folder) as running:
        yield running


@pytest.fixture(scope="module")
def client(server: Server) -> Any:
    from openai import OpenAI

    return OpenAI(base_url=f"http://{server.http}/v1", api_key="none", max_retries=0, timeout=60)


def ask(client: Any, **options: Any) -> Any:
    given = {"model": "chat", "messages": QUESTION, "temperature": 0, "max_completion_tokens": 12, **options}
    return client.chat.completions.create(**given)


def next_logits(decoder: Path, tokens: list[int]) -> Array:
    shape = (1, DECODER.kv_heads, 0, DECODER.head)
    feeds = {f"past_key_values.{n}.{k}": np.zeros(shape, "f4") for n in range(DECODER.layers) for k in ("key", "value")}
    feeds |= {"input_ids": np.array([tokens]), "attention_mask": np.ones((1, len(tokens)), np.int64)}
    logits: Array = run_whole(decoder, {**feeds, "position_ids": np.arange(len(tokens))[None]})["logits"][0, -1]
    return logits.astype(np.float64)


def test_answers_are_those_of_the_unsplit_model(client: Any, decoder: Path) -> None:
    expected = plain_loop(decoder, PROMPT, 12)
    assert END not in expected
    answer = ask(client)
    assert answer.choices[0].message.content == words(expected)
    assert (answer.choices[0].message.role, answer.choices[0].finish_reason) == ("assistant", "length")
    usage = answer.usage
    assert (usage.prompt_tokens, usage.completion_tokens, usage.total_tokens) == (5, 12, 17)
    texts = client.completions.create(model="other", prompt=words(PROMPT), temperature=0, max_tokens=12)
    ids = client.completions.create(model="other", prompt=PROMPT, temperature=0, max_tokens=12)
    assert texts.choices[0].text == ids.choices[0].text == words(expected)


def test_streams_are_the_answers_in_pieces(client: Any, decoder: Path) -> None:
    chunks = list(ask(client, stream=True, stream_options={"include_usage": True}))
    pieces = [chunk.choices[0].delta.content or "" for chunk in chunks[:-1]]
    assert "".join(pieces) == words(plain_loop(decoder, PROMPT, 12))
    assert len(pieces) == 13 and chunks[0].choices[0].delta.role == "assistant"
    assert [chunk.choices[0].finish_reason for chunk in chunks[-3:-1]] == [None, "length"]
    assert (chunks[-1].choices, chunks[-1].usage.completion_tokens) == ([], 12)


def test_stop_texts_end_an_answer(client: Any, decoder: Path) -> None:
    expected = plain_loop(decoder, PROMPT, 12)
    stop = words(expected[5:7])
    wanted = words(expected).partition(stop)[0]
    answer = ask(client, stop=["never", stop])
    assert (answer.choices[0].message.content, answer.choices[0].finish_reason) == (wanted, "stop")
    chunks = list(ask(client, stop=stop, stream=True))
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == wanted
    assert chunks[-1].choices[0].finish_reason == "stop"


def test_several_answers_to_a_question(client: Any, decoder: Path) -> None:
    expected = words(plain_loop(decoder, PROMPT, 12))
    answer = ask(client, n=3)
    assert [(one.index, one.message.content) for one in answer.choices] == [(n, expected) for n in range(3)]
    assert answer.usage.completion_tokens == 36
    drawn = [one.message.content for one in ask(client, n=2, temperature=2, seed=1).choices]
    assert drawn[0] != drawn[1] == ask(client, temperature=2, seed=2).choices[0].message.content
    texts = ["", "", ""]
    for chunk in ask(client, n=3, stream=True):
        texts[chunk.choices[0].index] += chunk.choices[0].delta.content or ""
    assert texts == [expected] * 3


@pytest.mark.parametrize("stream", [False, True])
def test_chances_are_those_of_the_unsplit_model(client: Any, decoder: Path, stream: bool) -> None:
    expected = plain_loop(decoder, PROMPT, 12)
    answer = ask(client, logprobs=True, top_logprobs=3, stream=stream)
    parts = [chunk.choices[0].logprobs for chunk in answer] if stream else [answer.choices[0].logprobs]
    told = [token for part in parts for token in part.content or ()]
    assert [token.token for token in told] == words(expected).split()
    for number in (0, 7):
        logits = next_logits(decoder, PROMPT + expected[:number])
        logs = logits - logits.max() - np.log(np.exp(logits - logits.max()).sum())
        best = np.argsort(-logs)[:3]
        assert [one.token for one in told[number].top_logprobs] == [f"w{token}" for token in best]
        np.testing.assert_allclose([one.logprob for one in told[number].top_logprobs], logs[best], atol=1e-4)
        assert told[number].logprob == told[number].top_logprobs[0].logprob
    stop = f" {words(expected[5:7])}"
    cut = ask(client, logprobs=True, stop=stop).choices[0]
    assert "".join(f"{token.token} " for token in cut.logprobs.content).strip() == cut.message.content.strip()


def test_seeds_decide_what_is_drawn(client: Any) -> None:
    drawn = [ask(client, temperature=2, seed=seed).choices[0].message.content for seed in (1, 1, 2)]
    assert drawn[0] == drawn[1] != drawn[2]
    free = {ask(client, temperature=2).choices[0].message.content for _ in range(3)}
    assert len(free) == 3


def test_errors_are_openais(client: Any) -> None:
    from openai import BadRequestError, NotFoundError

    with pytest.raises(BadRequestError, match=f"room for {CONTEXT} tokens, and the prompt has 5: ask for") as caught:
        ask(client, max_completion_tokens=CONTEXT)
    assert caught.value.code == "context_length_exceeded"
    long = [{"role": "user", "content": words([5] * CONTEXT)}]
    for stream in (False, True):
        with pytest.raises(BadRequestError, match="shorten it"):
            ask(client, messages=long, stream=stream)
    for field, value in {"n": 0, "logit_bias": {"5": 1}, "top_logprobs": 3, "seed": "x", "tools": TOOLS}.items():
        with pytest.raises(BadRequestError, match=field) as caught:
            ask(client, **{field: value})
        assert caught.value.param == field
    with pytest.raises(BadRequestError, match="no tools"):
        ask(client, messages=[{"role": "tool", "content": "w1", "tool_call_id": "1"}])
    with pytest.raises(BadRequestError, match="the model has a vocabulary of 96"):
        client.completions.create(model="chat", prompt=[5, 400])
    with pytest.raises(NotFoundError, match="there are chat, other"):
        ask(client, model="none")
    with pytest.raises(NotFoundError):
        client.models.retrieve("none")
    assert ask(client).choices[0].message.content


def test_models_are_listed(client: Any) -> None:
    assert {model.id for model in client.models.list()} == {"chat", "other"}
    assert client.models.retrieve("chat").owned_by == "splitc"


def test_clients_are_answered_at_the_same_time(client: Any, decoder: Path) -> None:
    questions = [[USER, 5 + n, 17, ANSWER] for n in range(6)]

    def answer(number: int) -> str:
        message = {"role": "user", "content": words(questions[number][1:-1])}
        chunks = ask(client, messages=[message], stream=number % 2 == 0, max_completion_tokens=40)
        if number % 2:
            return str(chunks.choices[0].message.content)
        return "".join(chunk.choices[0].delta.content or "" for chunk in chunks)

    with ThreadPoolExecutor(6) as clients:
        answers = list(clients.map(answer, range(6)))
    assert answers == [words(plain_loop(decoder, question, 40)) for question in questions]


def test_more_answers_than_the_limit_are_refused(client: Any) -> None:
    from openai import RateLimitError

    streams = [ask(client, model="other", stream=True, max_completion_tokens=2900) for _ in range(2)]
    with pytest.raises(RateLimitError, match="2 answers are being written, the limit"):
        ask(client, model="other")
    for stream in streams:
        stream.close()


def count_until_still(server: Server) -> float:
    """The number of finished requests, once it no longer rises."""
    before = -1.0
    while (now := counted(server)[DONE]) != before:
        before = now
        time.sleep(0.5)
    return now


@pytest.mark.parametrize("stream", [True, False])
def test_answer_ends_when_its_client_goes_away(server: Server, client: Any, decoder: Path, stream: bool) -> None:
    from openai import APITimeoutError

    before = count_until_still(server)
    if stream:
        chunks = ask(client, stream=True, max_completion_tokens=2900)
        next(chunks), next(chunks)
        chunks.close()
    else:
        with pytest.raises(APITimeoutError):
            ask(client.with_options(timeout=0.3), max_completion_tokens=2900)
    assert count_until_still(server) - before < 2000
    assert counted(server)['splitc_requests_in_flight{model="chat"}'] == 0
    assert ask(client).choices[0].message.content == words(plain_loop(decoder, PROMPT, 12))


def test_package_is_loaded_again_after_a_rank_died(package: Path, decoder: Path, tmp_path: Path) -> None:
    import psutil
    from openai import APIError, OpenAI

    tokenizer = write_chat_tokenizer(tmp_path / "tokenizer")
    serving = Serving("package", threads=1, ranks="processes")
    export_openai(package, tmp_path / "models", serving, name="chat", tokenizer=tokenizer, context=CONTEXT)
    with ml_server(tmp_path / "models", tmp_path) as server:
        client = OpenAI(base_url=f"http://{server.http}/v1", api_key="none", max_retries=0, timeout=60)
        chunks = ask(client, stream=True, max_completion_tokens=2900)
        next(chunks)
        ranks = psutil.Process(server.process.pid).children(recursive=True)
        assert len(ranks) >= 3
        for rank in ranks:
            rank.kill()
        with pytest.raises(APIError, match="rank"):
            list(chunks)
        assert ask(client).choices[0].message.content == words(plain_loop(decoder, PROMPT, 12))


def test_models_call_tools(package: Path, decoder: Path, tmp_path: Path) -> None:
    """What the model writes is a call by the tokenizer's response template, with the fourth token as its argument."""
    from openai import OpenAI

    tokenizer = write_chat_tokenizer(tmp_path / "tokenizer")
    expected = words(plain_loop(decoder, [USER, 7, *PROMPT], 4))
    config = json.loads((tokenizer / "tokenizer_config.json").read_text())
    config["chat_template"] = "{% if tools %}w60 w7 {% endif %}" + config["chat_template"]
    argument = r"(?P<argument>\w+)$"
    call = {
        **{"open_pattern": expected.rpartition(" ")[0] + " " + argument, "content": "text", "repeats": True},
        "transform": {"type": "function", "function": {"name": "add", "arguments": {"word": "{argument}"}}},
    }
    config["response_template"] = {"start_anchor": "w61", "fields": {"content": {}, "tool_calls": call}}
    write_json(tokenizer / "tokenizer_config.json", config)
    export_openai(package, tmp_path / "models", Serving("package", threads=1), name="chat", tokenizer=tokenizer)
    with ml_server(tmp_path / "models", tmp_path) as server:
        client = OpenAI(base_url=f"http://{server.http}/v1", api_key="none", max_retries=0, timeout=60)
        options = {"tools": TOOLS, "max_completion_tokens": 4}
        answer = ask(client, **options).choices[0]
        assert answer.finish_reason == "tool_calls" and answer.message.content is None
        (called,) = answer.message.tool_calls
        assert json.loads(called.function.arguments) == {"word": expected.split()[-1]}
        chunks = [chunk.choices[0] for chunk in ask(client, stream=True, **options)]
        (streamed,) = (call for chunk in chunks for call in chunk.delta.tool_calls or ())
        assert (streamed.index, streamed.function.arguments) == (0, called.function.arguments)
        assert chunks[-1].finish_reason == "tool_calls"
        assert ask(client, tool_choice="none", **options).choices[0].message.tool_calls is None
        turns = [*QUESTION, answer.message.model_dump(), {"role": "user", "tool_call_id": called.id, "content": "w3"}]
        assert ask(client, messages=turns, **options).usage.prompt_tokens > 5
