"""A package in a real server under load, compared with the unsplit model in the same server.

    make .venv/serving/done
    .venv/serving/bin/python -m tests.benchmarks.serving --server triton --clients 50 --seconds 60

Clients send requests of mixed sizes, some of them invalid, and compare each answer with the unsplit model's. Then the
server is stopped under load: each request must have been answered, or have ended with an error.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime as ort
import psutil

from models.llama import Size, build
from models.writer import save
from splitc.compiler import Request, compile_model, plan_model
from splitc.runtime.package.manifest_file import read_manifest
from splitc.runtime.serving.interface import find_interface
from splitc.runtime.serving.mlserver_folder import export_mlserver
from splitc.runtime.serving.serving_file import Serving
from splitc.runtime.serving.triton_config import model_config
from splitc.runtime.serving.triton_repository import export_triton
from tests.helpers.clients import Client
from tests.helpers.servers import Server, ml_server, triton_server

# The number of different requests, of which every tenth is invalid.
KINDS = 120
BAD = 10
# Seconds that a client waits for an answer.
PATIENCE = 60.0
# The tolerance of an answer, relative to its largest number: in batches of other sizes, sums are rounded otherwise.
TOLERANCE = 1e-4
# By how much the server's memory may grow from the second quarter of the time to the last.
GROWTH = 1.1


@dataclass(frozen=True)
class Case:
    """A request, and the right answer; None for an invalid one."""

    feeds: dict[str, Any]
    expected: dict[str, Any] | None


def make_cases(model: Path, size: Size) -> list[Case]:
    """Requests of mixed sizes with different numbers, so that no answer fits another request."""
    whole = ort.InferenceSession(str(model), providers=["CPUExecutionProvider"])
    names = [each.name for each in whole.get_outputs()]
    return [_make_case(number, whole, names, size) for number in range(KINDS)]


def _make_case(number: int, whole: ort.InferenceSession, names: Sequence[str], size: Size) -> Case:
    generator = np.random.default_rng(number)
    batch, new, past = (int(generator.integers(low, high)) for low, high in ((1, 4), (1, 33), (0, 17)))
    feeds: dict[str, Any] = {
        "input_ids": generator.integers(0, size.vocabulary, (batch, new)),
        "attention_mask": np.ones((batch, past + new), np.int64),
        "position_ids": np.broadcast_to(np.arange(past, past + new), (batch, new)).copy(),
    }
    for layer in range(size.layers):
        for part in ("key", "value"):
            shape = (batch, size.kv_heads, past, size.head)
            feeds[f"past_key_values.{layer}.{part}"] = generator.standard_normal(shape).astype(np.float32)
    if number % BAD == 0:  # a token that is not there, or a mask that does not fit: engines fail on both
        wrong = {"input_ids": feeds["input_ids"] + size.vocabulary, "attention_mask": feeds["attention_mask"][:, 1:]}
        name = list(wrong)[number // BAD % 2]
        return Case({**feeds, name: wrong[name]}, None)
    return Case(feeds, dict(zip(names, whole.run(names, feeds))))


@dataclass
class Found:
    """What the clients saw: how requests ended, the seconds of answers, and the cases with wrong answers."""

    ends: Counter[str] = field(default_factory=Counter)
    seconds: list[float] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)
    sent: int = 0


class Load(threading.Thread):
    """A client that sends one request after the other until it is told to stop, or the server is gone."""

    def __init__(self, number: int, server: Server, protocol: str, model: str, cases: Sequence[Case]) -> None:
        super().__init__(daemon=True)
        self._client = Client(server, protocol, PATIENCE)
        self._model, self._cases = model, cases
        self._generator = np.random.default_rng(number)
        self.found = Found()
        self.ended = threading.Event()
        self.down = threading.Event()

    def run(self) -> None:
        while not self.ended.is_set():
            number = int(self._generator.integers(len(self._cases)))
            start = time.perf_counter()
            self.found.sent += 1
            try:
                outputs = self._client.infer(self._model, self._cases[number].feeds)
            except Exception as error:  # of the client's library: a refused request, or a server that is gone
                self._note_error(number, error)
            else:
                self.found.seconds.append(time.perf_counter() - start)
                self._note(number, outputs)

    def _note(self, number: int, outputs: dict[str, Any]) -> None:
        expected = self._cases[number].expected
        if expected is None:
            self.found.wrong.append(f"{number}: an answer to a bad request")
        elif not all(_close(outputs[name], array) for name, array in expected.items()):
            self.found.wrong.append(f"{number}: another answer")
        self.found.ends["answered"] += 1

    def _note_error(self, number: int, error: Exception) -> None:
        if self.down.is_set():
            self.found.ends["ended with the server"] += 1
            time.sleep(0.05)
        elif self._cases[number].expected is None:
            self.found.ends["refused"] += 1
        else:
            self.found.ends["failed"] += 1
            self.found.wrong.append(f"{number}: {str(error)[:200]}")


def _close(found: Any, expected: Any) -> bool:
    if found.shape != expected.shape or found.dtype != expected.dtype:
        return False
    return not expected.size or float(np.abs(found - expected).max()) <= TOLERANCE * float(np.abs(expected).max())


def put_load(
    server: Server, protocol: str, model: str, cases: Sequence[Case], clients: int, seconds: float, stop: bool = False
) -> tuple[Found, list[int]]:
    """What this many clients saw in this time, and the server's bytes meanwhile. With `stop` it ends halfway."""
    loads = [Load(number, server, protocol, model, cases) for number in range(clients)]
    for load in loads:
        load.start()
    begin, memory = time.monotonic(), []
    while (passed := time.monotonic() - begin) < seconds:
        time.sleep(min(0.5, seconds / 20))
        if server.process.poll() is None:
            memory.append(bytes_of_tree(server.process.pid))
        if stop and passed > seconds / 2 and not loads[0].down.is_set():
            for load in loads:
                load.down.set()
            server.process.terminate()
    for load in loads:
        load.ended.set()
    for load in loads:
        load.join(PATIENCE + 10)
    lost = sum(load.is_alive() for load in loads)
    found = Found(wrong=[f"{lost} clients wait for ever"] if lost else [])
    for load in loads:
        found.ends.update(load.found.ends)
        found.seconds += load.found.seconds
        found.wrong += load.found.wrong
        found.sent += load.found.sent
    if found.sent != sum(found.ends.values()):
        found.wrong.append(f"{found.sent} requests were sent, and {sum(found.ends.values())} ended")
    return found, memory


def bytes_of_tree(pid: int) -> int:
    """The memory of a process and its children; shared pages count in each."""
    total = 0
    for process in (root := psutil.Process(pid), *root.children(recursive=True)):
        try:
            total += process.memory_info().rss
        except psutil.Error:  # it has just ended
            continue
    return total


def early_and_late(memory: Sequence[int]) -> tuple[float, float]:
    """The server's bytes in the second and in the last quarter of the time."""
    quarter = max(1, len(memory) // 4)
    return float(np.median(memory[quarter : 2 * quarter] or [0])), float(np.median(memory[-quarter:] or [0]))


def is_flat(memory: Sequence[int]) -> bool:
    """Whether the server's memory stays constant."""
    early, late = early_and_late(memory)
    return late <= GROWTH * early


def report(name: str, found: Found, memory: Sequence[int], seconds: float) -> dict[str, Any]:
    """Print and return the results."""
    times = np.array(found.seconds or [np.nan])
    start, (early, late) = memory[0], early_and_late(memory)
    result = {
        "model": name,
        "a second": round(len(found.seconds) / seconds, 1),
        **{f"{part} % ms": round(1e3 * float(np.percentile(times, part)), 1) for part in (50, 90, 99)},
        **found.ends,
        "MiB at the start, early, late": [round(size / 2**20, 1) for size in (start, early, late)],
        "wrong": found.wrong[:5],
    }
    print(json.dumps(result), flush=True)
    return result


def write_models(server: str, folder: Path, model: Path, devices: str) -> Path:
    """The package and the unsplit model, in the server's form."""
    compile_model(plan_model(model, [devices], Request(split_mode="layer")), folder / "package")
    models = folder / "models"
    serving = Serving("package", threads=1)
    if server == "mlserver":
        export_mlserver(folder / "package", models, serving, sequences=False)
        (models / "unsplit").mkdir()
        implementation = "tests.helpers.unsplit_in_mlserver.UnsplitModel"
        known = json.loads((models / "package" / "model-settings.json").read_text())
        settings = {**known, "name": "unsplit", "implementation": implementation, "parameters": {"uri": str(model)}}
        (models / "unsplit" / "model-settings.json").write_text(json.dumps(settings))
        return models
    export_triton(folder / "package", models, serving, sequences=False)
    version = models / "unsplit" / "1"
    version.mkdir(parents=True)
    interface = find_interface(read_manifest(folder / "package"), sequences=False)
    (models / "unsplit" / "config.pbtxt").write_text(model_config("unsplit", interface))
    (version / "model.py").write_text("from tests.helpers.unsplit_in_triton import TritonPythonModel\n")
    (version / "model.txt").write_text(str(model))
    return models


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--server", choices=("triton", "mlserver"), default="triton")
    parser.add_argument("--protocol", choices=("http", "json", "grpc"), help="Default: http, and json for MLServer.")
    parser.add_argument("--devices", default="2xcpu")
    parser.add_argument("--clients", type=int, default=50)
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--hidden", type=int, default=256)
    options = parser.parse_args()
    protocol = options.protocol or ("json" if options.server == "mlserver" else "http")
    hidden = options.hidden
    size = Size(options.layers, hidden, heads=8, kv_heads=4, feed_forward=3 * hidden, vocabulary=512)
    start = ml_server if options.server == "mlserver" else triton_server
    os.environ["PYTHONPATH"] = str(Path(__file__).resolve().parents[2])  # the server imports the unsplit model's code
    wrong = []
    with tempfile.TemporaryDirectory(prefix="splitc-serving-") as place:
        folder, model = Path(place), Path(place) / "model.onnx"
        save(build(size), model)
        models = write_models(options.server, folder, model, options.devices)
        cases = make_cases(model, size)
        with start(models, folder) as server:
            for name in ("package", "unsplit"):
                put_load(server, protocol, name, cases, options.clients, min(5.0, options.seconds))
                found, memory = put_load(server, protocol, name, cases, options.clients, options.seconds)
                report(name, found, memory, options.seconds)
                wrong += found.wrong
                if name == "package" and not is_flat(memory):
                    wrong.append("the server's memory grows")
            found, memory = put_load(server, protocol, "package", cases, options.clients, 16.0, stop=True)
            report("package, stopped halfway", found, memory, 8.0)
            wrong += found.wrong
    if wrong:
        raise SystemExit(f"answers were lost or wrong: {wrong[:10]}")


if __name__ == "__main__":
    main()
