"""Everything that wants a GPU, in one go, as a table: correctness, memory, and ratios of times taken in one run.

    python -m tests.gpu.table --devices 2xcuda --engine onnxruntime --layers 32 --work /tmp/gpu
    python -m tests.gpu.table --devices 2xcpu --layers 2 --hidden 256 --tokens 8     # the same, without a GPU

A decoder of the dimensions of an 8B model is made in half precision (on CPU devices in single) and compiled for one
device, and for all of them in layer and in tensor mode. For each package: its outputs against ONNX Runtime's on the
CPU, decoding token by token with the cache on the devices, a prompt, prompts with several requests in flight, and the
memory of each device beside what was predicted. All times are medians; those of packages are taken in turns with those
of one device. TensorRT engines are built for caches up to the largest that the run comes to.
"""

from __future__ import annotations

import argparse
import shutil
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx_ir as ir

from models.llama import Size, build
from models.writer import save
from splitc.compiler import Request, compile_model, plan_model
from splitc.compiler.build.package import BuildSettings
from splitc.runtime import Session
from splitc.runtime.compare import compare, load_unsplit
from splitc.runtime.devices import parse_devices
from splitc.runtime.manifest import BuildOptions
from splitc.runtime.terminal import out, table
from splitc.runtime.units import format_bytes, format_seconds

Feeds = dict[str, npt.NDArray[Any]]
# Requests under way at the same time, and rounds of turns.
IN_FLIGHT, ROUNDS = 4, 5


def main() -> None:
    options = _parse()
    devices = [str(device) for device in parse_devices([options.devices])]
    model = _make_model(options)
    rows = table("package", "error", "token", "x", "prompt", "x", "prompts", "x", right=("error", "x"))
    memory = table("package", "device", "weights", "loaded", "predicted", "peak")
    places = {"one device": ("layer", devices[:1]), "layer": ("layer", devices), "tensor": ("tensor", devices)}
    with ExitStack() as stack:
        sessions = {
            name: stack.enter_context(_package(model, name, mode, on, options)) for name, (mode, on) in places.items()
        }
        errors = {name: _error(model, session, options) for name, session in sessions.items()}
        tokens = _in_turns(sessions, lambda session: _decode(session, options))
        prompts = _in_turns(sessions, lambda session: _prompt(session, options))
        streams = _in_turns(sessions, lambda session: _stream(session, options))
        for name, session in sessions.items():
            cells = []
            for times in (tokens, prompts, streams):
                cells += [format_seconds(times[name]), f"{times['one device'] / times[name]:.2f}"]
            rows.add_row(name, f"{errors[name]:.1e}", *cells)
            for each in session.device_memory():
                numbers = (each.predicted_weights, each.loaded, each.predicted_total, each.peak)
                memory.add_row(name, each.device, *map(format_bytes, numbers))
    out.print(rows)
    out.print(memory)


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--devices", default="2xcuda")
    parser.add_argument("--engine")
    parser.add_argument("--work", type=Path, default=Path("/tmp/splitc-gpu-table"))
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--hidden", type=int, default=4096)
    parser.add_argument("--vocabulary", type=int, default=32000)
    parser.add_argument("--cache", type=int, default=1024, help="tokens in the cache before the first that is timed")
    parser.add_argument("--tokens", type=int, default=50, help="tokens that are timed, in each round")
    parser.add_argument("--prompt", type=int, default=512)
    parser.add_argument("--optimization-level", type=int)
    return parser.parse_args()


def _make_model(options: argparse.Namespace) -> Path:
    path: Path = options.work / "model" / "decoder.onnx"
    if not path.exists():
        heads = max(2, options.hidden // 128)
        size = Size(
            layers=options.layers,
            hidden=options.hidden,
            heads=heads,
            kv_heads=max(2, heads // 4),
            feed_forward=options.hidden * 7 // 2,
            vocabulary=options.vocabulary,
            dtype=ir.DataType.FLOAT if "cpu" in options.devices else ir.DataType.FLOAT16,
        )
        path.parent.mkdir(parents=True, exist_ok=True)
        save(build(size), path)
    return path


@contextmanager
def _package(model: Path, name: str, mode: str, devices: list[str], options: argparse.Namespace) -> Iterator[Session]:
    """The model compiled for the devices, and loaded."""
    target = options.work / name.replace(" ", "-")
    shutil.rmtree(target, ignore_errors=True)
    past = options.cache + options.tokens * (ROUNDS + 1)
    start = time.monotonic()
    cache = "past_key_values.0.key"
    heads, size = _head_sizes(model, cache)
    request = Request(
        split_mode=mode,
        engine=options.engine,
        spread=True,
        min_shapes={"input_ids": (1, 1), "attention_mask": (1, 1), cache: (1, heads, 0, size)},
        opt_shapes={"input_ids": (1, 1), "attention_mask": (1, past + 1), cache: (1, heads, past, size)},
        max_shapes={
            "input_ids": (1, options.prompt),
            "attention_mask": (1, past + options.prompt),
            cache: (1, heads, past, size),
        },
    )
    plan = plan_model(model, devices, request)
    build_options = BuildOptions(optimization_level=options.optimization_level, tactic_sources=[])
    compile_model(plan, target, verify=False, build=BuildSettings(build_options))
    compiled = time.monotonic()
    with Session(target, verify=False, in_flight=IN_FLIGHT) as session:
        loaded = time.monotonic() - compiled
        out.print(f"{name}: compiled in {compiled - start:.1f} s, loaded in {loaded:.1f} s")
        yield session


def _head_sizes(model: Path, cache: str) -> tuple[int, int]:
    """How many heads a cache has, and how large they are."""
    shape = next(value.shape for value in ir.load(model).graph.inputs if value.name == cache)
    assert shape is not None
    return int(shape[1]), int(shape[3])


def _in_turns(sessions: Mapping[str, Session], work: Any) -> dict[str, float]:
    """Median seconds of the work in each session, after once for warming up."""
    times: dict[str, list[float]] = {name: [] for name in sessions}
    for number in range(ROUNDS + 1):
        for name, session in sessions.items():
            seconds = work(session)
            if number:
                times[name].append(seconds)
    return {name: median(each) for name, each in times.items()}


def _tokens(count: int, past: int, options: argparse.Namespace) -> Feeds:
    generator = np.random.default_rng(past)
    return {
        "input_ids": generator.integers(0, options.vocabulary, (1, count)),
        "attention_mask": np.ones((1, past + count), np.int64),
        "position_ids": np.arange(past, past + count)[None],
    }


def _with_cache(session: Session, count: int, past: int, options: argparse.Namespace) -> Feeds:
    """Feeds of all inputs, with made-up caches."""
    generator = np.random.default_rng(0)
    states = {state.input for state in session.manifest.states}
    caches = {
        tensor.name: generator.standard_normal((1, int(tensor.shape[1] or 1), past, int(tensor.shape[3] or 1)))
        for tensor in session.inputs
        if tensor.name in states
    }
    return {
        **_tokens(count, past, options),
        **{t.name: caches[t.name].astype(t.dtype) for t in session.inputs if t.name in caches},
    }


def _error(model: Path, session: Session, options: argparse.Namespace) -> float:
    """The largest error of an output, relative to its largest value, against ONNX Runtime on the CPU."""
    feeds = _with_cache(session, 4, 32, options)
    found = compare(load_unsplit(model, 8)(feeds), session.run(feeds), number_type=session.manifest.number_type)
    return max(difference.relative for difference in found)


def _decode(session: Session, options: argparse.Namespace) -> float:
    """Seconds a token, the cache staying on the devices."""
    with session.start() as sequence:
        feeds = _with_cache(session, 1, options.cache, options)
        states = {state.input for state in session.manifest.states}
        sequence.load({name: array for name, array in feeds.items() if name in states})
        sequence.run({name: array for name, array in feeds.items() if name not in states})
        steps = [_tokens(1, options.cache + 1 + number, options) for number in range(options.tokens)]
        start = time.perf_counter()
        for step in steps:
            sequence.run(step)
        return (time.perf_counter() - start) / options.tokens


def _prompt(session: Session, options: argparse.Namespace) -> float:
    """Seconds for a prompt, from tokens to logits; the cache that it makes stays on the devices."""
    with session.start() as sequence:
        start = time.perf_counter()
        sequence.run(_tokens(options.prompt, 0, options))
        return time.perf_counter() - start


def _stream(session: Session, options: argparse.Namespace) -> float:
    """Seconds a prompt, with several under way."""
    feeds = _with_cache(session, options.prompt, 0, options)
    start = time.perf_counter()
    for _ in session.map([feeds] * (2 * IN_FLIGHT)):
        pass
    return (time.perf_counter() - start) / (2 * IN_FLIGHT)


if __name__ == "__main__":
    main()
