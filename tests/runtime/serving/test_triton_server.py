"""Triton itself, from pip, serves packages. `make test-serving` runs this."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import pytest

from splitc.compiler import compile_model, plan_model
from splitc.runtime.serving.serving_file import Serving
from splitc.runtime.serving.triton_repository import export_triton
from tests.conftest import LAYER, assert_close, decoder_feeds, run_whole
from tests.helpers.clients import generate, infer
from tests.helpers.greedy import plain_loop
from tests.helpers.servers import Server, counted, has_triton, triton_server

pytestmark = pytest.mark.skipif(not has_triton(), reason="needs nvidia-pytriton and tritonclient")

SCALARS = """<ir_version: 8, opset_import: ["" : 17]> g (float[n, 4] "a/x", float t, int64[n] shift)
=> (float[n, 4] y, float total) {
    c = Cast <to: int = 1> (shift) c2 = Constant <value_ints: ints = [1]> () k = Unsqueeze (c, c2)
    m = Mul ("a/x", t) y = Add (m, k) total = ReduceSum <keepdims: int = 0> (y)
}"""


@pytest.fixture(scope="module")
def scalars(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model with scalars, dependent rows, and a slash in a name."""
    path = tmp_path_factory.mktemp("scalars") / "scalars.onnx"
    ir.save(ir.from_onnx_text(SCALARS), path)
    return path


@pytest.fixture(scope="module")
def server(package: Path, scalars: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("triton")
    compile_model(plan_model(scalars, ["cpu0"], LAYER), folder / "scalars")
    repository = folder / "repository"
    serving = Serving("package", threads=1)
    export_triton(package, repository, serving, name="decoder")
    export_triton(package, repository, Serving("package", threads=1, idle_seconds=2.0), name="hasty")
    (stateless,) = export_triton(package, repository, serving, name="stateless", sequences=False)
    with (stateless / "config.pbtxt").open("a") as config:  # as for ranks on GPUs: here tensors stay on the host
        config.write('parameters { key: "FORCE_CPU_ONLY_INPUT_TENSORS" value { string_value: "no" } }\n')
    export_triton(folder / "scalars", repository, serving)
    processes = Serving("package", threads=1, ranks="processes")
    export_triton(package, repository, processes, name="processes", sequences=False)
    with triton_server(repository, folder) as running:
        yield running


@pytest.mark.parametrize("protocol", ["http", "grpc"])
def test_requests_of_several_clients_are_answered_each(server: Server, decoder: Path, protocol: str) -> None:
    sizes = [(1 + n % 3, 1 + n % 5, n % 4) for n in range(24)]
    asked = [decoder_feeds(*size) for size in sizes]
    with ThreadPoolExecutor(8) as clients:
        found = list(clients.map(lambda feeds: infer(server, "stateless", feeds, protocol), asked))
    for feeds, outputs in zip(asked, found):
        assert_close(outputs, run_whole(decoder, feeds))


def test_bad_request_fails_alone(server: Server, decoder: Path) -> None:
    from tritonclient.utils import InferenceServerException

    good = decoder_feeds(1, 2, 3)
    unknown = {**good, "input_ids": good["input_ids"] + 5000}

    def ask(number: int) -> Any:
        try:
            return infer(server, "stateless", unknown if number % 4 == 0 else good)
        except InferenceServerException as error:
            return error

    with ThreadPoolExecutor(8) as clients:
        found = list(clients.map(ask, range(32)))
    expected = run_whole(decoder, good)
    for number, each in enumerate(found):
        if number % 4 == 0:
            assert isinstance(each, InferenceServerException) and "out of" in str(each).lower()
        else:
            assert_close(each, expected)
    with pytest.raises(InferenceServerException, match="batch size does not match other inputs"):
        infer(server, "stateless", {**good, "input_ids": good["input_ids"][0]})
    wrong = {**good, "attention_mask": np.ones((1, 3), np.int64)}
    with pytest.raises(InferenceServerException, match="attention_mask"):
        infer(server, "stateless", wrong)


def test_scalars_are_arrays_of_one_element(server: Server, scalars: Path) -> None:
    feeds = {"a/x": np.arange(8, dtype=np.float32).reshape(2, 4), "shift": np.array([1, 2])}
    found = infer(server, "scalars", {**feeds, "t": np.array([3], np.float32)})
    expected = run_whole(scalars, {**feeds, "t": np.array(3, np.float32)})
    assert_close(found, {**expected, "total": expected["total"].reshape(1)})


def test_sequences_keep_their_states_on_the_ranks(server: Server, decoder: Path) -> None:
    prompts = [[5, 17, 33, 2, 90, 41, 8][n % 5 :] for n in range(8)]
    with ThreadPoolExecutor(8) as clients:
        found = list(clients.map(lambda n: generate(server, "decoder", prompts[n], 12, n + 1, "http"), range(8)))
    assert found == [plain_loop(decoder, prompt, 12) for prompt in prompts]


def test_abandoned_sequence_ends(server: Server) -> None:
    from tritonclient.utils import InferenceServerException

    feeds = {name: array for name, array in decoder_feeds(1, 4, 0).items() if not name.startswith("past")}
    infer(server, "hasty", feeds, sequence_id=7, sequence_start=True)
    infer(server, "hasty", {**feeds, "attention_mask": np.ones((1, 8), np.int64)}, sequence_id=7)
    time.sleep(4)
    with pytest.raises(InferenceServerException, match="must specify the START flag"):
        infer(server, "hasty", feeds, sequence_id=7)
    infer(server, "hasty", feeds, sequence_id=7, sequence_start=True)


def test_rank_that_dies_is_started_again(server: Server, decoder: Path) -> None:
    import psutil
    from tritonclient.utils import InferenceServerException

    feeds = decoder_feeds()
    expected = run_whole(decoder, feeds)
    assert_close(infer(server, "processes", feeds), expected)
    children = psutil.Process(server.process.pid).children(recursive=True)
    ranks = [each for each in children if any("splitc.runtime.processes" in word for word in each.cmdline())]
    assert len(ranks) >= 3
    ranks[-1].kill()
    end = time.monotonic() + 60
    while True:
        try:
            found = infer(server, "processes", feeds)
            break
        except InferenceServerException as error:
            assert "rank" in str(error), "it says what happened"
            assert time.monotonic() < end
    assert_close(found, expected)
    assert_close(infer(server, "stateless", feeds), expected)


def test_metadata_says_what_the_model_takes(server: Server) -> None:
    metadata = json.loads(server.get(f"{server.http}/v2/models/decoder"))
    assert [each["name"] for each in metadata["inputs"]] == ["input_ids", "attention_mask", "position_ids"]
    assert metadata["outputs"] == [{"name": "logits", "datatype": "FP32", "shape": [-1, -1, 96]}]
    assert "nv_inference_request_success" in server.get(f"{server.metrics}/metrics")


def test_page_of_metrics_has_the_packages_counters(server: Server) -> None:
    before = counted(server)
    for _ in range(3):
        infer(server, "stateless", decoder_feeds())
    infer(server, "processes", decoder_feeds())
    after = counted(server)
    done = 'splitc_requests_done_total{model="%s"}'
    assert after[done % "stateless"] == before.get(done % "stateless", 0) + 3
    assert after[done % "processes"] == before.get(done % "processes", 0) + 1
    assert after['splitc_requests_in_flight{model="stateless"}'] == 0
    busy = {name: value for name, value in after.items() if name.startswith("splitc_rank_busy_seconds_total")}
    assert len([name for name in busy if 'model="stateless"' in name]) == 3 and min(busy.values()) > 0
