"""Batches divided over two devices, and streams of single requests over two copies, compared with the unsplit model.

    python -m tests.benchmarks.batch [--rows 8] [--runs 10] [--model encoder=PATH ...]

A decoder's prompt, and any further models with rows. First one batch at a time: the package on two devices with one
thread each, ONNX Runtime with two threads, and with one. Then requests of one row, four in flight: two copies, layer
mode on the same devices, and ONNX Runtime with two threads, one request at a time. All take turns, so that they see the
same load of the machine; ratios are medians of neighbouring runs.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from contextlib import ExitStack
from pathlib import Path
from statistics import median, quantiles
from typing import Any

import numpy as np
import onnxruntime as ort
from msgspec.structs import replace

from models.llama import Size, build
from models.writer import save
from splitc.compiler import Request, compile_model, plan_model
from splitc.runtime import Session
from splitc.runtime.cli.terminal import out, table
from splitc.runtime.feeds.fills import make_inputs
from splitc.runtime.units import format_seconds

Feeds = dict[str, np.ndarray]
DECODER = Size(layers=8, hidden=512, heads=8, kv_heads=4, feed_forward=1376, vocabulary=4000)
DEVICES = ["2xcpu"]
IN_FLIGHT = 4
# Requests in a round of a stream.
ROUND = 16


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=8)
    parser.add_argument("--runs", type=int, default=10)
    parser.add_argument("--model", nargs="*", default=[])
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="splitc-batch-") as name:
        folder = Path(name)
        save(build(DECODER), folder / "decoder.onnx")
        named = dict(text.split("=", 1) for text in options.model)
        models = {"decoder prompt": folder / "decoder.onnx", **{title: Path(path) for title, path in named.items()}}
        batches = table("batch", "package", "unsplit, 2 threads", "1 thread", "times 2 threads", "times 1 thread")
        streams = table("stream", "way", "rate", "latency", "90 %", right=("rate", "latency", "90 %"))
        for title, model in models.items():
            _batches(title, model, folder, options, batches)
            _streams(title, model, folder, options, streams)
        out.print(batches)
        out.print(streams)


def _unsplit(model: Path, threads: int) -> Callable[[Feeds], Any]:
    settings = ort.SessionOptions()
    settings.intra_op_num_threads = threads
    session = ort.InferenceSession(model, settings, providers=["CPUExecutionProvider"])
    return lambda feeds: session.run(None, feeds)


def _feeds(session: Session, rows: int, length: int) -> Feeds:
    """Inputs of this many rows. Texts have this length, and caches are empty."""
    axes = session.manifest.batch or {}
    states = {state.input: state.grows for state in session.manifest.states}
    inputs = []
    for tensor in session.inputs:
        shape = [*(tensor.sample_shape or ())]
        if tensor.name in axes:
            shape[axes[tensor.name]] = rows
        if (grows := states.get(tensor.name)) is not None:
            shape[grows] = 0
        for axis, size in enumerate(tensor.shape or ()):
            if isinstance(size, str) and axis == 1 and len(shape) == 2 and tensor.name not in states:
                shape[axis] = length
        inputs.append(replace(tensor, sample_shape=shape))
    return make_inputs(inputs)


def _open(stack: ExitStack, model: Path, package: Path, request: Request) -> Session:
    compile_model(plan_model(model, DEVICES, request), package, force=True, verify=False)
    return stack.enter_context(Session(package, threads=1, verify="never"))


def _batches(title: str, model: Path, folder: Path, options: argparse.Namespace, rows: Any) -> None:
    with ExitStack() as stack:
        session = _open(stack, model, folder / "package", Request(split_mode="batch"))
        feeds = _feeds(session, options.rows, 128)
        ways: Mapping[str, Callable[[Feeds], Any]] = {
            "package": session.run,
            "two": _unsplit(model, 2),
            "one": _unsplit(model, 1),
        }
        times: dict[str, list[float]] = {name: [] for name in ways}
        for number in range(options.runs + 1):
            for name, run in ways.items():
                begin = time.perf_counter()
                run(feeds)
                if number:
                    times[name].append(time.perf_counter() - begin)
    ratios = [
        median(other / own for other, own in zip(times[name], times["package"], strict=True)) for name in ("two", "one")
    ]
    rows.add_row(title, *(format_seconds(median(took)) for took in times.values()), *(f"{r:.2f}" for r in ratios))


def _streams(title: str, model: Path, folder: Path, options: argparse.Namespace, rows: Any) -> None:
    with ExitStack() as stack:
        copies = _open(stack, model, folder / "copies", Request(split_mode="batch"))
        layers = _open(stack, model, folder / "layers", Request(split_mode="layer", spread=True))
        feeds = _feeds(copies, 1, 128)
        whole = _unsplit(model, 2)
        ways: dict[str, Callable[[], tuple[float, list[float]]]] = {
            "2 copies": lambda: _stream(copies, feeds),
            "layer on 2": lambda: _stream(layers, feeds),
            "unsplit, 2 threads": lambda: _one_by_one(whole, feeds),
        }
        rates: dict[str, list[float]] = {name: [] for name in ways}
        latencies: dict[str, list[float]] = {name: [] for name in ways}
        for number in range(max(3, options.runs // 2) + 1):
            for name, run in ways.items():
                seconds, each = run()
                if number:
                    rates[name].append(ROUND / seconds)
                    latencies[name] += each
    for name in ways:
        worst = quantiles(latencies[name], n=10)[-1]
        own = (format_seconds(median(latencies[name])), format_seconds(worst))
        rows.add_row(title, name, f"{median(rates[name]):.1f}/s", *own)


def _stream(session: Session, feeds: Feeds) -> tuple[float, list[float]]:
    """The seconds of a round of requests, and of each request from its submission to its outputs."""
    ends: dict[int, float] = {}
    begins: dict[int, float] = {}
    futures: list[Future[Any]] = []
    begin = time.perf_counter()
    for number in range(ROUND):
        if number >= IN_FLIGHT:
            futures[number - IN_FLIGHT].result()
        begins[number] = time.perf_counter()
        futures.append(session.submit(feeds))
        futures[-1].add_done_callback(lambda _, number=number: ends.update({number: time.perf_counter()}))  # type: ignore[misc]
    for future in futures:
        future.result()
    seconds = time.perf_counter() - begin
    return seconds, [ends[number] - begins[number] for number in range(ROUND)]


def _one_by_one(run: Callable[[Feeds], Any], feeds: Feeds) -> tuple[float, list[float]]:
    times = []
    for _ in range(ROUND):
        begin = time.perf_counter()
        run(feeds)
        times.append(time.perf_counter() - begin)
    return sum(times), times


if __name__ == "__main__":
    main()
