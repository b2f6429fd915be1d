"""Auto mode's predictions compared with each candidate's measured times, and its choice with the best candidate.

    python -m tests.benchmarks.auto [--devices 2xcpu] [--profile] [--runs 10] [--only NAME ...]

Small and large decoders, with batches of 1, 2 and 8, for one token after 128 others and for a prompt of 128. Every
candidate is compiled and timed in turns with the others: one request at a time, and as a stream of requests of several
sequences, whose caches stay on the devices. The least time of all rounds counts, since other programs only add to it.
Predictions use what `splitc devices --measure` measured, as plans do.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import numpy.typing as npt
from msgspec.structs import replace

from models.llama import Size, build
from models.writer import save
from splitc.compiler import Plan, Request, compile_model
from splitc.compiler.modes.auto import choose, plan_alternatives
from splitc.compiler.packaging.profiling import measure_blocks
from splitc.compiler.planning.resources import Resources, find_budgets
from splitc.compiler.request.request import OBJECTIVES
from splitc.runtime import Session
from splitc.runtime.cli.terminal import out, table
from splitc.runtime.feeds.fills import make_inputs
from splitc.runtime.hardware.devices import parse_devices
from splitc.runtime.hardware.machine import known_machine
from splitc.runtime.requests.sequence import StateSequence
from splitc.runtime.units import format_seconds

Feeds = dict[str, npt.NDArray[Any]]
SIZES = {
    "small": Size(layers=4, hidden=256, heads=8, kv_heads=4, feed_forward=688, vocabulary=2000),
    "large": Size(layers=12, hidden=768, heads=12, kv_heads=4, feed_forward=2048, vocabulary=8000),
}
# New and past tokens.
WORK = {"token": (1, 128), "prompt": (128, 0)}
ROUNDS = 6


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--devices", default="2xcpu")
    parser.add_argument("--profile", action="store_true")
    parser.add_argument("--runs", type=int, default=10)
    parser.add_argument("--only", nargs="*", default=[])
    options = parser.parse_args()
    summary = table("model", "objective", "chosen", "best", "chosen / best", right=("chosen / best",))
    with tempfile.TemporaryDirectory(prefix="splitc-auto-") as folder:
        for name, size in SIZES.items():
            model = Path(folder) / name / "model.onnx"
            model.parent.mkdir()
            save(build(size), model)
            for work, (new, past) in WORK.items():
                for batch in (1, 2, 8):
                    title = f"{name} {work} x{batch}"
                    if not options.only or title in options.only:
                        _compare(title, model, size, (batch, new, past), options, summary)
    out.print(summary)


def _shapes(size: Size, batch: int, new: int, past: int) -> dict[str, tuple[int, ...]]:
    cache = (batch, size.kv_heads, past, size.head)
    caches = {f"past_key_values.{layer}.{part}": cache for layer in range(size.layers) for part in ("key", "value")}
    ids = {"input_ids": (batch, new), "attention_mask": (batch, past + new), "position_ids": (batch, new)}
    return {**ids, **caches}


def _compare(
    title: str, model: Path, size: Size, work: tuple[int, int, int], options: argparse.Namespace, summary: Any
) -> None:
    """Predict and measure every candidate for one kind of work."""
    devices = parse_devices([options.devices])
    timer = measure_blocks if options.profile else None
    budgets = tuple(find_budgets(devices, [], 1 << 30))
    resources = Resources(tuple(devices), budgets, timer=timer, machine=known_machine())
    request = Request(shapes=_shapes(size, *work), profile=options.profile)
    tried = plan_alternatives(model, resources, request)
    plans = {alternative.name: (alternative, plan) for alternative, plan in tried if isinstance(plan, Plan)}
    with tempfile.TemporaryDirectory(prefix="splitc-auto-") as folder, ExitStack() as stack:
        sessions = {}
        for name, (_, plan) in plans.items():
            compile_model(plan, Path(folder) / name, verify=False)
            sessions[name] = stack.enter_context(Session(Path(folder) / name, verify="never"))
        steps = _steps(next(iter(sessions.values())), size, *work)
        measured = _measure(sessions, steps, options.runs)
    numbers = ("predicted", "measured")
    rows = table(title, *numbers, "in a stream: predicted", "measured ", right=(*numbers, "measured "))
    for name, (alternative, _) in plans.items():
        latency, interval = measured[name]
        cells = (alternative.latency, latency, alternative.interval, interval)
        rows.add_row(name, *map(format_seconds, cells))
    out.print(rows)
    for number, objective in enumerate(reversed(OBJECTIVES)):
        chosen = choose([alternative for alternative, _ in tried], objective).name
        best = min(measured, key=lambda name: measured[name][number])
        ratio = measured[chosen][number] / measured[best][number]
        summary.add_row(title, objective, chosen, best, f"{ratio:.2f}")


def _steps(session: Session, size: Size, batch: int, new: int, past: int) -> list[Feeds]:
    """The states of a sequence, the requests that put its caches in place, and the request that is timed."""
    lengths = [(new, past)] if past == 0 else [(new, past - new), (new, past)]
    states = {state.input for state in session.manifest.states}
    found: list[Feeds] = []
    for each in lengths:
        shapes = _shapes(size, batch, *each)
        arrays = make_inputs([replace(tensor, sample_shape=list(shapes[tensor.name])) for tensor in session.inputs])
        found = found or [{name: array for name, array in arrays.items() if name in states}]
        found.append({name: array for name, array in arrays.items() if name not in states})
    return found


@contextmanager
def _sequences(session: Session, steps: Sequence[Feeds], count: int) -> Iterator[list[StateSequence]]:
    """Sequences that have only their last step left."""
    with ExitStack() as stack:
        made = [stack.enter_context(session.start()) for _ in range(count)]
        for sequence in made:
            sequence.load(steps[0])
            for feeds in steps[1:-1]:
                sequence.run(feeds)
        yield made


def _measure(sessions: dict[str, Session], steps: Sequence[Feeds], runs: int) -> dict[str, tuple[float, float]]:
    """The least seconds of a request, and between those of a stream, for each session. The sessions take turns."""
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in sessions}
    for number in range(ROUNDS + 1):
        for name, session in sessions.items():
            found = _one_by_one(session, steps, runs), _streamed(session, steps, runs)
            if number:
                times[name].append(found)
    return {name: (min(a for a, _ in each), min(b for _, b in each)) for name, each in times.items()}


def _one_by_one(session: Session, steps: Sequence[Feeds], runs: int) -> float:
    seconds = []
    with _sequences(session, steps, runs) as sequences:
        for sequence in sequences:
            start = time.perf_counter()
            sequence.run(steps[-1])
            seconds.append(time.perf_counter() - start)
    return min(seconds)


def _streamed(session: Session, steps: Sequence[Feeds], runs: int) -> float:
    with _sequences(session, steps, runs) as sequences, ThreadPoolExecutor(session.in_flight) as pool:
        start = time.perf_counter()
        for _ in pool.map(lambda sequence: sequence.run(steps[-1]), sequences):
            pass
        return (time.perf_counter() - start) / runs


if __name__ == "__main__":
    main()
