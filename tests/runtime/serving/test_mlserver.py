"""MLServer, from pip, serves packages by the open inference protocol. `make test-serving` runs this."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from splitc.runtime.serving.mlserver_folder import export_mlserver
from splitc.runtime.serving.serving_file import Serving
from tests.conftest import assert_close, decoder_feeds, run_whole
from tests.helpers.clients import generate, infer
from tests.helpers.greedy import plain_loop
from tests.helpers.servers import Server, counted, has_mlserver, ml_server

pytestmark = pytest.mark.skipif(not has_mlserver(), reason="needs mlserver and tritonclient")


@pytest.fixture(scope="module")
def server(package: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("mlserver")
    serving = Serving("package", threads=1)
    export_mlserver(package, folder / "models", serving, name="decoder")
    export_mlserver(package, folder / "models", serving, name="stateless", sequences=False)
    with ml_server(folder / "models", folder) as running:
        yield running


@pytest.mark.parametrize("protocol", ["json", "grpc"])
def test_requests_of_several_clients_are_answered_each(server: Server, decoder: Path, protocol: str) -> None:
    asked = [decoder_feeds(1 + n % 3, 1 + n % 5, n % 4) for n in range(24)]
    with ThreadPoolExecutor(8) as clients:
        found = list(clients.map(lambda feeds: infer(server, "stateless", feeds, protocol), asked))
    for feeds, outputs in zip(asked, found):
        assert_close(outputs, run_whole(decoder, feeds))


@pytest.mark.parametrize("protocol", ["json", "grpc"])
def test_sequences_keep_their_states_on_the_ranks(server: Server, decoder: Path, protocol: str) -> None:
    prompts = [[5, 17, 33, 2, 90, 41, 8][n % 5 :] for n in range(6)]
    with ThreadPoolExecutor(6) as clients:
        found = list(clients.map(lambda n: generate(server, "decoder", prompts[n], 8, n + 1, protocol), range(6)))
    assert found == [plain_loop(decoder, prompt, 8) for prompt in prompts]


def test_bad_requests_fail_alone(server: Server, decoder: Path) -> None:
    from tritonclient.utils import InferenceServerException

    good = decoder_feeds(1, 2, 3)
    bad: list[tuple[Any, str]] = [
        ({**good, "input_ids": good["input_ids"] + 5000}, "out of"),
        ({**good, "attention_mask": np.ones((1, 5), np.float32)}, "the model takes int64"),
        ({"input_ids": good["input_ids"]}, "no array for the inputs"),
    ]

    def ask(number: int) -> Any:
        try:
            return infer(server, "stateless", bad[number // 4 % 3][0] if number % 4 == 0 else good, "json")
        except InferenceServerException as error:
            return error

    with ThreadPoolExecutor(8) as clients:
        found = list(clients.map(ask, range(24)))
    expected = run_whole(decoder, good)
    for number, each in enumerate(found):
        if number % 4 == 0:
            assert bad[number // 4 % 3][1] in str(each)
        else:
            assert_close(each, expected)


def test_server_says_what_it_has(server: Server, decoder: Path) -> None:
    infer(server, "stateless", decoder_feeds(), "json")
    metadata = json.loads(server.get(f"{server.http}/v2/models/decoder"))
    assert [(each["name"], each["shape"]) for each in metadata["inputs"]][:2] == [
        ("input_ids", [-1, -1]),
        ("attention_mask", [-1, -1]),
    ]
    assert 'model_infer_request_success_total{model="stateless"' in server.get(f"{server.metrics}/metrics")


def test_page_of_metrics_has_the_packages_counters(server: Server) -> None:
    done = 'splitc_requests_done_total{model="stateless"}'
    before = counted(server).get(done, 0)
    for _ in range(3):
        infer(server, "stateless", decoder_feeds(), "json")
    after = counted(server)
    assert after[done] == before + 3
    assert after['splitc_requests_in_flight{model="stateless"}'] == 0
    busy = [after[name] for name in after if name.startswith("splitc_rank_busy_seconds_total") and "stateless" in name]
    assert len(busy) == 3 and min(busy) > 0


def test_model_can_be_loaded_again(server: Server, decoder: Path) -> None:
    feeds = decoder_feeds(1, 2, 3)
    for action in ("unload", "load"):
        server.post(f"{server.http}/v2/repository/models/stateless/{action}")
        while action == "load" and not server.is_ready():
            time.sleep(0.1)
    assert_close(infer(server, "stateless", feeds, "json"), run_whole(decoder, feeds))
