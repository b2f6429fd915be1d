"""Requests from many threads at once: some are cancelled, some fail, some submit others in their callback.

    python -m tests.benchmarks.soak --requests 100000 --threads 50 --ranks threads processes

Meanwhile sessions are closed, and others opened. Each answer is compared with numpy's. Prints how many requests ended
in which way, and after each tenth the memory, the descriptors and the threads of this process, without those that
submit requests: they must stay constant.
"""

from __future__ import annotations

import argparse
import random
import tempfile
import threading
import time
from collections import Counter
from concurrent.futures import CancelledError, Future
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import psutil

from models.writer import save
from splitc.compiler import Request, compile_model, plan_model
from splitc.runtime import Session
from splitc.runtime.cli.terminal import out, table
from splitc.runtime.errors import SplitcError
from splitc.runtime.units import format_bytes
from tests.helpers.blocks import INT, Block

ROWS, WIDTH = 32, 64
# One of so many requests is cancelled, fails, or submits another one in its callback.
CANCELLED, FAILING, CHAINED = 10, 50, 10
# Requests after which a session is closed.
SESSION = 5_000


@dataclass
class Model:
    """y = table[ids] A B, with known weights."""

    package: Path
    weights: dict[str, npt.NDArray[Any]]

    def expected(self, ids: npt.NDArray[Any]) -> npt.NDArray[Any]:
        """The outputs that the package must give."""
        made: npt.NDArray[Any] = self.weights["table"][ids] @ self.weights["A"] @ self.weights["B"]
        return made


def compile_soaked(folder: Path, mode: str) -> Model:
    """The package of a small model on two CPU devices."""
    block = Block()
    ids = block.input("ids", INT, ["n"])
    rows = block.op("Gather", block.w("table", ROWS, WIDTH), ids)
    wide = block.op("MatMul", rows, block.w("A", WIDTH, WIDTH))
    block.give(block.op("MatMul", wide, block.w("B", WIDTH, WIDTH)), shape=["n", WIDTH])
    model = block.model()
    save(model, folder / "model.onnx")
    weights = {name: value.const_value.numpy() for name, value in model.graph.initializers.items() if value.const_value}
    request = Request(split_mode=mode, spread=True, shapes={"ids": (4,)})
    compile_model(plan_model(folder / "model.onnx", ["2xcpu"], request), folder / mode)
    return Model(folder / mode, weights)


@dataclass
class Soak:
    """Threads that submit requests to the session that is open, until there are enough."""

    model: Model
    ranks: str
    requests: int
    ended: Counter[str] = field(default_factory=Counter)
    lock: threading.Lock = field(default_factory=threading.Lock)
    given: int = 0

    def open(self) -> Session:
        return Session(self.model.package, threads=1, ranks=self.ranks, in_flight=8)

    def count(self, what: str) -> None:
        with self.lock:
            self.ended[what] += 1

    def next(self) -> int | None:
        """The number of the next request; None if there are enough."""
        with self.lock:
            self.given += 1
            return self.given if self.given <= self.requests else None

    def check(self, future: Future[Any], ids: npt.NDArray[Any]) -> None:
        """Count how a request ended."""
        try:
            made = future.result(60)["y"]
        except CancelledError:
            self.count("cancelled")
        except TimeoutError:
            self.count("HUNG")
        except SplitcError as error:
            closed, fails = "closed" in str(error), int(ids.max()) >= ROWS
            self.count("closed" if closed else "failed" if fails else f"FAILED: {error}")
        else:
            right = np.allclose(made, self.model.expected(ids), rtol=1e-4, atol=1e-5)
            self.count("right" if right else "WRONG")

    def work(self, seed: int) -> None:
        """The work of one thread."""
        chance = random.Random(seed)
        numbers = np.random.default_rng(seed)
        while self.next() is not None:
            ids = numbers.integers(0, ROWS, chance.randint(1, 6))
            if not chance.randrange(FAILING):
                ids[0] = ROWS + 7
            try:
                future = self.session.submit({"ids": ids})
            except SplitcError as error:
                self.count("refused" if "closed" in str(error) else f"REFUSED: {error}")
                time.sleep(0.01)
                continue
            if not chance.randrange(CHAINED):
                future.add_done_callback(lambda _: self.chain(numbers.integers(0, ROWS, 3)))
            if not chance.randrange(CANCELLED):
                future.cancel()
            self.check(future, ids)

    def chain(self, ids: npt.NDArray[Any]) -> None:
        """Submit a request in the callback of another one, if there is a place for it."""
        try:
            future = self.session.submit({"ids": ids})
        except SplitcError as error:
            told = "too many requests" in str(error) or "closed" in str(error)
            self.count("no place in a callback" if told else f"REFUSED in a callback: {error}")
        else:
            future.add_done_callback(lambda made: self.check(made, ids))

    def run(self, count: int) -> None:
        """Run all threads, and print the results."""
        rows = table(
            "requests", "memory", "descriptors", "threads", right=("requests", "memory", "descriptors", "threads")
        )
        process, start = psutil.Process(), time.monotonic()
        self.session = self.open()
        threads = [threading.Thread(target=self.work, args=(seed,)) for seed in range(count)]
        for thread in threads:
            thread.start()
        told = closed = 0
        while any(thread.is_alive() for thread in threads):
            time.sleep(0.05)
            if self.given - closed > SESSION:
                closed, before = self.given, self.session
                self.session = self.open()
                before.close()
            if self.given - told > self.requests / 10:
                told = self.given
                inside = process.memory_info().rss, process.num_fds(), threading.active_count() - count
                rows.add_row(f"{told:,}", format_bytes(inside[0]), *map(str, inside[1:]))
        self.session.close()
        out.print(rows)
        seconds = time.monotonic() - start
        out.print(f"{self.model.package.name}, {self.ranks}: {dict(self.ended)}, {seconds:.0f} s")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=100_000)
    parser.add_argument("--threads", type=int, default=50)
    parser.add_argument("--ranks", nargs="+", default=["threads", "processes"])
    parser.add_argument("--modes", nargs="+", default=["layer", "tensor"])
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        for mode in options.modes:
            model = compile_soaked(Path(folder), mode)
            for ranks in options.ranks:
                Soak(model, ranks, options.requests).run(options.threads)


if __name__ == "__main__":
    main()
