"""Many small requests of random sizes, some of them bad, from several threads: nothing lost, swapped or left behind.

    python -m tests.benchmarks.soak --requests 50000 --minutes 20

Each answer is compared with the unsplit model's for the same feeds. Requests are spread over the minutes.
"""

from __future__ import annotations

import argparse
import tempfile
import threading
import time
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import numpy as np
import psutil

from models.llama import Size, build
from models.writer import save
from splitc.compiler import Request, compile_model, plan_model
from splitc.runtime import Session
from splitc.runtime.engines.onnxruntime_cpu import OnnxRuntimeBackend
from splitc.runtime.errors import EngineError, FeedError

SMALL = Size(layers=3, hidden=32, heads=4, kv_heads=2, feed_forward=48, vocabulary=64)
# Every so many requests one is bad: half of those are refused at once, the others fail in an engine.
BAD = 100
# Answers that are waited for together.
WINDOW = 16


def feeds_of(seed: int) -> dict[str, Any]:
    """Feeds of a size and with numbers that follow from the seed."""
    generator = np.random.default_rng(seed)
    batch, new, past = (int(generator.integers(low, high)) for low, high in ((1, 4), (1, 9), (0, 9)))
    feeds: dict[str, Any] = {
        "input_ids": generator.integers(0, SMALL.vocabulary, (batch, new)),
        "attention_mask": np.ones((batch, past + new), np.int64),
        "position_ids": np.broadcast_to(np.arange(past, past + new), (batch, new)).copy(),
    }
    for layer in range(SMALL.layers):
        for part in ("key", "value"):
            shape = (batch, SMALL.kv_heads, past, SMALL.head)
            feeds[f"past_key_values.{layer}.{part}"] = generator.standard_normal(shape).astype(np.float32)
    return feeds


class Client(threading.Thread):
    """Sends its requests, and compares what comes back."""

    def __init__(self, session: Session, model: Path, seeds: range, seconds: float) -> None:
        super().__init__()
        self._session, self._seeds, self._seconds = session, seeds, seconds
        self._backend = OnnxRuntimeBackend(1)
        self._whole = self._backend.load(model)
        self.answers = self.refused = self.failed = 0
        self.wrong: list[int] = []

    def run(self) -> None:
        start = time.monotonic()
        pending: list[tuple[int, Future[Any]]] = []
        for number, seed in enumerate(self._seeds):
            feeds = feeds_of(seed)
            if seed % BAD == 0:
                feeds["attention_mask"] = feeds["attention_mask"].astype(np.float32)
            elif seed % BAD == BAD // 2:
                feeds["input_ids"] = feeds["input_ids"] + SMALL.vocabulary
            try:
                pending.append((seed, self._session.submit(feeds)))
            except FeedError:
                self.refused += 1
            if len(pending) == WINDOW:
                self.check(pending)
            time.sleep(max(0.0, start + self._seconds * number / len(self._seeds) - time.monotonic()))
        self.check(pending)

    def check(self, pending: list[tuple[int, Future[Any]]]) -> None:
        for seed, future in pending:
            try:
                outputs = future.result(timeout=60)
            except EngineError:
                self.failed += 1
                continue
            self.answers += 1
            feeds = feeds_of(seed)
            expected = self._whole.run({name: self._backend.upload(feeds[name]) for name in self._whole.inputs})
            for name, value in expected.items():
                array = value.numpy()
                if outputs[name].shape != array.shape or not np.allclose(outputs[name], array, atol=1e-4):
                    self.wrong.append(seed)
                    break
        pending.clear()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=50_000)
    parser.add_argument("--minutes", type=float, default=20.0)
    parser.add_argument("--clients", type=int, default=4)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="splitc-soak-") as folder:
        model = Path(folder) / "model.onnx"
        save(build(SMALL), model)
        sessions = []
        for mode, devices in (("layer", "3xcpu"), ("tensor", "2xcpu")):
            compile_model(plan_model(model, [devices], Request(split_mode=mode)), Path(folder) / mode)
            sessions.append(Session(Path(folder) / mode, threads=1))
        process = psutil.Process()
        share = options.requests // options.clients
        clients = [
            Client(sessions[n % 2], model, range(n * share, (n + 1) * share), 60 * options.minutes)
            for n in range(options.clients)
        ]
        for client in clients:
            client.start()
        begin = time.monotonic()
        while any(client.is_alive() for client in clients):
            done = sum(client.answers + client.failed + client.refused for client in clients)
            print(
                f"{time.monotonic() - begin:6.0f} s  {done:6} requests  {process.memory_info().rss >> 20} MiB",
                flush=True,
            )
            for client in clients:
                client.join(60 * options.minutes / 20 / len(clients))
        for session in sessions:
            session.close()
        wrong = [seed for client in clients for seed in client.wrong]
        counts = {name: sum(getattr(client, name) for client in clients) for name in ("answers", "refused", "failed")}
        print(
            counts, "wrong:", wrong[:10], f"{process.memory_info().rss >> 20} MiB, {threading.active_count()} threads"
        )
        if wrong or sum(counts.values()) != share * len(clients):
            raise SystemExit("answers were lost or wrong")


if __name__ == "__main__":
    main()
