"""All measurements on GPUs, as tables: correctness, memory, and times that are compared within one run.

    python -m tests.gpu.table --devices 2xcuda 4xcuda --engine onnxruntime --work /tmp/gpu
    python -m tests.gpu.table --devices 2xcpu --layers 2 --hidden 256 --tokens 8     # the same, without a GPU

A decoder with the dimensions of an 8B model, with room in its cache, is compiled for one device, and for each set of
devices in each mode. For each package: steps of one token with a full cache, as CUDA graphs and eagerly; the part of a
step in which no GPU is busy; a prompt; prompts with several requests in flight; and the memory of each device beside
the prediction. All times are medians; those of packages are measured in turns with those of one device.

Correctness is tested with a decoder of fewer layers and random weights, compared with ONNX Runtime on the CPU. The
large one's weights are zeros: to make others would take longer than all else.

For ONNX Runtime the decoder has fused operators. For TensorRT it has standard ones, and no prompts: a package takes one
token at a time.
"""

from __future__ import annotations

import argparse
import shutil
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx_ir as ir

from models import llama, llama_fused
from models.llama import Size, save_sparse
from models.writer import save
from splitc.compiler import compile_model, plan_model
from splitc.compiler.packaging.building import BuildSettings
from splitc.runtime import Session
from splitc.runtime.arrays.array import number_type
from splitc.runtime.cli.terminal import out, table
from splitc.runtime.hardware.devices import parse_devices
from splitc.runtime.package.manifest import BuildOptions
from splitc.runtime.ranks.loop import Replay
from splitc.runtime.requests.sequence import StateSequence
from splitc.runtime.tools.compare import compare
from splitc.runtime.tools.unsplit import CPU, open_unsplit
from splitc.runtime.units import format_bytes, format_seconds
from tests.gpu.ways import predicted, way_request

Feeds = dict[str, npt.NDArray[Any]]
# Requests in flight, rounds of turns, and prompts in each.
IN_FLIGHT, ROUNDS, PROMPTS = 4, 3, 32
# The bytes that an H200 reads in a second, and its operations in a second, as measured.
BYTES, FLOPS = 4.3e12, 790e12


def main() -> None:
    options = _parse()
    places = [[str(device) for device in parse_devices([each])] for each in options.devices]
    split = {f"{mode} on {len(on)}": (mode, on) for on in places for mode in options.modes.split(",")}
    kinds = {"one device": ("layer", places[0][:1]), **split}
    small = _make_model(options, options.work / "small", options.check_layers, save)
    large = _make_model(options, options.work / "large", options.layers, save_sparse)
    # Compiled before, so that timed work has the devices alone.
    with ProcessPoolExecutor(1 if options.profile else None, mp_context=get_context("spawn")) as pool:
        made = {
            (model, name): pool.submit(_compile, model, name, *kind, options)
            for model in (small, large)
            for name, kind in kinds.items()
        }
        packages = {key: future.result() for key, future in made.items()}
    errors = {}
    for name in kinds:
        with _load(packages[small, name]) as session:
            errors[name] = _error(small, session, options)
    memory = table("package", "device", "weights", "loaded", "predicted", "peak")
    with ExitStack() as stack:
        sessions = {}
        for name in kinds:
            sessions[name] = session = stack.enter_context(_load(packages[large, name]))
            _try(session, options)
            for each in session.device_memory():  # now: later the other packages' memory would be in it
                numbers = (each.predicted_loaded, each.loaded, each.predicted_total, each.peak)
                memory.add_row(name, each.device, *map(format_bytes, numbers))
        out.print(memory)
        _report(sessions, errors, options)


def _report(sessions: Mapping[str, Session], errors: Mapping[str, float], options: argparse.Namespace) -> None:
    """Time all sessions in turns, and print the results."""
    rows = table("package", "error", "token", "x", "host", right=("error", "x"))
    steps = {name: _Steps(session, options) for name, session in sessions.items()}
    graphs = _in_turns({name: step.run for name, step in steps.items()})
    shares = {name: step.host_share() for name, step in steps.items()}
    for name, step in steps.items():
        step.sequence.close()
        rows.add_row(
            name,
            f"{errors[name]:.1e}",
            *_times(graphs, name),
            f"{100 * shares[name]:.1f}%",
        )
    out.print(rows)
    floor = options.weights / BYTES
    out.print(f"a token on one device reads {format_bytes(int(options.weights))}: {format_seconds(floor)} at best")
    if not options.capacity_only:
        _report_prompts(sessions, options)
    for name, session in sessions.items():
        for note in session.notes:
            out.print(f"{name}: {note}")


def _report_prompts(sessions: Mapping[str, Session], options: argparse.Namespace) -> None:
    rows = table("package", "prompt", "x", "again", "x", f"{IN_FLIGHT} in flight", "x", right=("x",))
    first = _in_turns({name: partial(_prompt, session, options) for name, session in sessions.items()})
    again = _in_turns({name: partial(_prompt_again, session, options) for name, session in sessions.items()})
    stream = _in_turns({name: partial(_stream, session, options) for name, session in sessions.items()})
    for name in sessions:
        rows.add_row(name, *_times(first, name), *_times(again, name), *_times(stream, name))
    out.print(rows)
    floor = 2 * options.weights / 2 * options.prompt / FLOPS
    out.print(f"a prompt of {options.prompt} tokens on one device takes {format_seconds(floor)} at best")


def _try(session: Session, options: argparse.Namespace) -> None:
    """Run all that is timed later once."""
    steps = _Steps(session, options)
    for _ in range(3):
        steps.run()
    steps.sequence.close()
    if not options.capacity_only:
        _prompt(session, options)


def _times(times: Mapping[str, float], name: str) -> tuple[str, str]:
    return format_seconds(times[name]), f"{times['one device'] / times[name]:.2f}"


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--devices", nargs="+", default=["2xcuda"])
    parser.add_argument("--engine", default="onnxruntime")
    parser.add_argument("--modes", default="layer,row,tensor")
    parser.add_argument("--work", type=Path, default=Path("/tmp/splitc-gpu-table"))
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--check-layers", type=int, default=2, help="of the decoder whose outputs are compared")
    parser.add_argument("--hidden", type=int, default=4096)
    parser.add_argument("--vocabulary", type=int, default=32000)
    parser.add_argument("--cache", type=int, default=1024, help="tokens in the cache")
    parser.add_argument("--tokens", type=int, default=30, help="tokens that are timed, in each round")
    parser.add_argument("--prompt", type=int, default=512)
    parser.add_argument("--optimization-level", type=int)
    parser.add_argument("--profile", action="store_true", help="time each block on the devices, for the plans")
    options = parser.parse_args()
    options.capacity_only = options.engine != "onnxruntime"
    return options


def _size(options: argparse.Namespace, layers: int) -> Size:
    heads = max(2, options.hidden // 128)
    return Size(
        layers=layers,
        hidden=options.hidden,
        heads=heads,
        kv_heads=max(2, heads // 4),
        feed_forward=options.hidden * 7 // 2,
        vocabulary=options.vocabulary,
        dtype=ir.DataType.FLOAT if "cpu" in options.devices[0] else ir.DataType.FLOAT16,
        capacity=2 * options.cache if options.capacity_only else 0,
        longest=max(Size.longest, 2 * options.cache),
    )


def _make_model(
    options: argparse.Namespace, folder: Path, layers: int, write: Callable[[ir.Model, Path], None]
) -> Path:
    """The decoder's file. `options.weights` are the bytes of weights that a token reads."""
    model = (llama if options.capacity_only else llama_fused).build(_size(options, layers))
    weights = [value for value in model.graph.initializers.values() if value.name != "model.embed_tokens.weight"]
    options.weights = sum(value.const_value.nbytes for value in weights if value.const_value is not None)
    path = folder / "decoder.onnx"
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        write(model, path)
    return path


def _compile(model: Path, name: str, mode: str, devices: list[str], options: argparse.Namespace) -> Path:
    """The package for the devices."""
    target = model.parent / name.replace(" ", "-")
    shutil.rmtree(target, ignore_errors=True)
    start = time.monotonic()
    shapes: dict[str, Any] = {"input_ids": (1, 1), "attention_mask": (1, 2 * options.cache)}
    if not options.capacity_only:
        shapes["past_key_values.0.key"] = (1, *_size(options, 1).cache_shape(2 * options.cache))
    memory = () if "cpu" in options.devices[0] else ("120GiB",)  # what is free has the other packages in it
    request = way_request(mode, engine=options.engine, shapes=shapes, memory=memory, profile=options.profile)
    plan = plan_model(model, devices, request)
    tactics: list[str] | None = None if options.engine == "onnxruntime" else []
    build_options = BuildOptions(optimization_level=options.optimization_level, tactic_sources=tactics)
    weights = "link" if mode == "layer" and options.engine == "onnxruntime" else "copy"
    compile_model(plan, target, weights=weights, verify=False, build=BuildSettings(build_options))
    times = predicted(plan)
    print(
        f"{model.parent.name}, {name}: compiled in {time.monotonic() - start:.1f} s; a token is predicted to take "
        f"{format_seconds(times.latency)}, or one every {format_seconds(times.interval)}",
        flush=True,
    )
    return target


@contextmanager
def _load(package: Path) -> Iterator[Session]:
    """The package's session. The package is deleted."""
    start = time.monotonic()
    with Session(package, verify="never", in_flight=IN_FLIGHT) as session:
        out.print(f"{package.parent.name}, {package.name}: loaded in {time.monotonic() - start:.1f} s")
        yield session
    shutil.rmtree(package)


def _in_turns(work: Mapping[str, Callable[[], float]]) -> dict[str, float]:
    """The median seconds of each work, after two runs to warm up."""
    times: dict[str, list[float]] = {name: [] for name in work}
    for number in range(ROUNDS + 2):
        for name, run in work.items():
            seconds = run()
            if number > 1:
                times[name].append(seconds)
    return {name: median(each) for name, each in times.items()}


def _tokens(session: Session, count: int, place: int, options: argparse.Namespace) -> Feeds:
    """Feeds for some new tokens after others, in a cache with room for twice as many as are timed."""
    generator = np.random.default_rng(place)
    feeds: Feeds = {
        "input_ids": generator.integers(0, options.vocabulary, (1, count)),
        "attention_mask": (np.arange(2 * options.cache) < place + count).astype(np.int64)[None],
        "position_ids": np.arange(place, place + count)[None],
    }
    return {tensor.name: feeds[tensor.name] for tensor in session.inputs if tensor.name in feeds}


def _states(session: Session, tokens: int) -> Feeds:
    """Caches of this many tokens, for one row."""
    grows = {state.input: state.grows for state in session.manifest.states}
    return {
        tensor.name: np.zeros(
            [
                tokens if axis == grows[tensor.name] else size if isinstance(size, int) else 1
                for axis, size in enumerate(tensor.shape or ())
            ],
            number_type(tensor.dtype),
        )
        for tensor in session.manifest.inputs
        if tensor.name in grows
    }


class _Steps:
    """A sequence with a full cache, whose next tokens are timed."""

    def __init__(self, session: Session, options: argparse.Namespace) -> None:
        self.session, self._options = session, options
        self.sequence = self._begin()

    def _begin(self) -> StateSequence:
        self._place = self._options.cache
        if self._options.capacity_only:
            return self.session.start()
        sequence = self.session.start(capacity=2 * self._options.cache)
        sequence.load(_states(self.session, self._options.cache))
        return sequence

    def _make_room(self) -> None:
        """Begin again if the cache has no room for as many tokens as are timed at once."""
        if self._place + self._options.tokens > 2 * self._options.cache:
            self.sequence.close()
            self.sequence = self._begin()

    def run(self) -> float:
        """The seconds of a token."""
        self._make_room()
        feeds = [self._next() for _ in range(self._options.tokens)]
        start = time.perf_counter()
        for each in feeds:
            self.sequence.run(each)
        return (time.perf_counter() - start) / len(feeds)

    def host_share(self) -> float:
        """The part of a step in which no GPU is busy; NaN if steps are not replayed."""
        shares = []
        self._make_room()
        for _ in range(self._options.tokens):
            feeds = self._next()
            start = time.perf_counter()
            request = self.sequence._next_request(feeds)
            self.session.submit_request(request, here=True).result()
            self.session.join(request)
            self.sequence._tokens += 1
            whole = time.perf_counter() - start
            spans = [span for span in request.executions[0].spans if isinstance(span.step, Replay)]
            shares.append(1 - (spans[0].end - spans[0].start) / whole if spans else float("nan"))
        return median(shares)

    def _next(self) -> Feeds:
        self._place += 1
        return _tokens(self.session, 1, self._place - 1, self._options)


def _error(model: Path, session: Session, options: argparse.Namespace) -> float:
    """The largest error of an output, relative to its largest value, compared with ONNX Runtime on the CPU.

    Three steps of a sequence, of which the last is replayed, and with prompts one of several tokens.
    """
    worst = 0.0
    room = 2 * options.cache
    sizes = [1, 1, 1] if options.capacity_only else [5, 1, 1, 1]
    shape = (1, *_size(options, 1).cache_shape(room))
    states = {
        state.input: np.zeros(shape, next(t.dtype for t in session.inputs if t.name == state.input))
        for state in session.manifest.states
    }
    capacity = None if options.capacity_only else room
    with open_unsplit(model, CPU, 8) as whole, session.start(capacity=capacity) as sequence:
        place = 0
        for count in sizes:
            feeds = _tokens(session, count, place, options)
            place += count
            expected = whole({**feeds, **states})
            states = {state.input: expected[state.output] for state in session.manifest.states}
            own = sequence.run(feeds)
            found = compare({"logits": expected["logits"]}, own, number_type=session.manifest.number_type)
            worst = max(worst, *(difference.relative for difference in found))
    return worst


def _prompt(session: Session, options: argparse.Namespace) -> float:
    """The seconds of a new prompt, from tokens to logits. Its cache stays on the devices."""
    with session.start() as sequence:
        feeds = _tokens(session, options.prompt, 0, options)
        start = time.perf_counter()
        sequence.run({**feeds, "attention_mask": np.ones((1, options.prompt), np.int64)})
        return time.perf_counter() - start


def _prompt_again(session: Session, options: argparse.Namespace) -> float:
    """The seconds of a prompt of a previously seen length, in a cache that has room."""
    with session.start(capacity=2 * options.cache) as sequence:
        feeds = _tokens(session, options.prompt, 0, options)
        for _ in range(3):
            start = time.perf_counter()
            sequence.run(feeds)
        return time.perf_counter() - start


def _stream(session: Session, options: argparse.Namespace) -> float:
    """The seconds between the outputs of a stream of prompts."""
    with ThreadPoolExecutor(IN_FLIGHT) as pool:
        start = time.perf_counter()
        list(pool.map(lambda _: _prompt(session, options), range(PROMPTS)))
        return (time.perf_counter() - start) / PROMPTS


if __name__ == "__main__":
    main()
