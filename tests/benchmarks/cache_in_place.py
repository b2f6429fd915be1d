"""Tokens of an exported decoder with caches in place, compared with concatenated caches.

    python -m tests.benchmarks.cache_in_place MODEL.onnx [MODEL.onnx ...] --devices cpu0 --threads 1

Both packages take turns in one process. Prints a line for each case: a token after some others in a sequence, the same
with caches that the caller feeds, several rows with several tokens each, and prompts; and the largest relative
difference of all outputs. `ON_CPUS` in
`splitc.compiler.patterns.kernels` is based on this.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from functools import partial
from pathlib import Path

import numpy as np

from splitc.compiler import Request, compile_model, plan_model
from splitc.runtime import Session
from splitc.runtime.cli.terminal import out, table
from splitc.runtime.generate.feeder import Feeder
from splitc.runtime.generate.signature import find_signature
from splitc.runtime.package.manifest import Manifest
from splitc.runtime.requests.sequence import StateSequence
from tests.helpers.steps import made_feeds

Arrays = Mapping[str, np.ndarray]
Run = Callable[[], Arrays]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="+", type=Path)
    parser.add_argument("--devices", nargs="+", default=["cpu0"])
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--mode", default="layer")
    parser.add_argument("--after", type=int, nargs="+", default=[64, 512, 2000])
    parser.add_argument("--prompts", type=int, nargs="+", default=[16, 512])
    parser.add_argument("--rows", type=int, default=2)
    parser.add_argument("--chunk", type=int, default=8)
    parser.add_argument("--runs", type=int, default=15)
    options = parser.parse_args()
    rows = table("", "concatenated", "in place", "ratio", "difference", right=("concatenated", "in place", "ratio"))
    for model in options.models:
        with tempfile.TemporaryDirectory() as place, ExitStack() as stack:
            sessions = []
            for name in ("concatenated", "in place"):
                request = Request(split_mode=options.mode, no_fuse=name == "concatenated", shapes=shapes_of(model))
                plan = plan_model(model, options.devices, request)
                compile_model(plan, Path(place) / name, threads=options.threads)
                sessions.append(stack.enter_context(Session(Path(place) / name)))
            assert sessions[1].manifest.lengths, f"{model}: {[outcome.why for outcome in plan.analysis.outcomes]}"
            for name, runs in cases(sessions, options, stack):
                times, difference = measure(runs, options.runs)
                ratio = f"{times[0] / times[1]:.2f}"
                rows.add_row(f"{model.parent.name}: {name}", *(f"{1e3 * t:.2f} ms" for t in times), ratio, difference)
    out.print(rows)


def shapes_of(model: Path) -> dict[str, tuple[int, ...]]:
    """The planned shapes: one row, one token after some others."""
    plan = plan_model(model, ["cpu0"], Request(split_mode="layer", no_fuse=True))
    pasts = {state.input: state.grows for state in plan.analysis.states}
    shapes = {}
    for name, shape in plan.analysis.shapes.items():
        if name in pasts:
            shapes[name] = tuple(1 if n == 0 else 16 if n == pasts[name] else size for n, size in enumerate(shape))
        else:
            shapes[name] = (1, 17 if "mask" in name else 1)
    return shapes


def cases(sessions: list[Session], options: argparse.Namespace, stack: ExitStack) -> Iterator[tuple[str, list[Run]]]:
    """Cases: their names, and a run of each session."""
    manifest = sessions[0].manifest
    feeder = Feeder(manifest, find_signature(manifest))
    ids = next(tensor for tensor in manifest.inputs if tensor.name == feeder.signature.ids)
    generator = np.random.default_rng(0)
    is_single = ids.shape is not None and ids.shape[1] == 1
    for count in options.after:
        pasts = made_pasts(manifest, count, 1, generator)
        runs: list[Run] = []
        for session in sessions:
            sequence = stack.enter_context(session.start(count + 64 if session.manifest.lengths else None))
            sequence.load(pasts)
            runs.append(partial(step, sequence, feeder, iter(range(count + 1, count + 65))))
        yield f"a token after {count}", runs
        fed = {**feeder.feeds([5], count + 1), **pasts}
        yield f"a token after {count} that are fed", [partial(session.run, fed) for session in sessions]
        if not is_single:
            yield f"{options.rows} rows of {options.chunk} after {count}", in_rows(sessions, options, count, stack)
    for prompt in () if is_single else options.prompts:
        tokens = generator.integers(1, 100, prompt).tolist()
        yield f"a prompt of {prompt}", [partial(read, session, feeder, tokens) for session in sessions]


def made_pasts(manifest: Manifest, count: int, rows: int, generator: np.random.Generator) -> dict[str, np.ndarray]:
    """Caches of so many tokens."""
    shapes = {tensor.name: tensor.sample_shape or [] for tensor in manifest.inputs}
    made = {}
    for state in manifest.states:
        shape = [rows, *shapes[state.input][1:]]
        shape[state.grows or 2] = count
        made[state.input] = generator.standard_normal(shape, np.float32)
    return made


def in_rows(sessions: list[Session], options: argparse.Namespace, count: int, stack: ExitStack) -> list[Run]:
    """Runs of chunks of prompts in several rows, in a sequence of each session that begins with some tokens."""
    runs: list[Run] = []
    for session in sessions:
        sequence = stack.enter_context(session.start())
        sequence.load(made_pasts(session.manifest, count, options.rows, np.random.default_rng(0)))
        befores = iter(range(count, count + 200 * options.chunk, options.chunk))
        runs.append(partial(step_rows, sequence, session.manifest, options, befores))
    return runs


def step_rows(
    sequence: StateSequence, manifest: Manifest, options: argparse.Namespace, befores: Iterator[int]
) -> Arrays:
    """Run the next chunks of a sequence."""
    return sequence.run(made_feeds(manifest, options.rows, next(befores), options.chunk))


def step(sequence: StateSequence, feeder: Feeder, totals: Iterator[int]) -> Arrays:
    """Run the next token of a sequence."""
    return sequence.run(feeder.feeds([5], next(totals)))


def read(session: Session, feeder: Feeder, tokens: list[int]) -> Arrays:
    """Run a prompt in a new sequence."""
    with session.start(len(tokens) + 64 if session.manifest.lengths else None) as sequence:
        return sequence.run(feeder.feeds(tokens, len(tokens)))


def measure(runs: list[Run], count: int) -> tuple[list[float], str]:
    """The median seconds of each function, run in turns, and the largest difference of their outputs."""
    worst = 0.0
    seconds: list[list[float]] = [[] for _ in runs]
    for number in range(count + 2):
        outputs = []
        for times, run in zip(seconds, runs, strict=True):
            start = time.perf_counter()
            outputs.append(run())
            if number > 1:
                times.append(time.perf_counter() - start)
        one, other = outputs
        worst = max(worst, *(float(np.abs(one[n] - other[n]).max() / np.abs(one[n]).max()) for n in one))
    return [statistics.median(times) for times in seconds], f"{worst:.1e}"


if __name__ == "__main__":
    main()
