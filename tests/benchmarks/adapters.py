"""What adapters cost: requests without slots, with slots and no adapter, with an adapter, and with it merged.

    python -m tests.benchmarks.adapters MODEL.onnx [MODEL.onnx ...] --devices cpu0 cpu1 --mode tensor --rank 16

All packages take turns in one process. Prints a line for each case: a request of the planned sizes, and, for a model
with caches, a token of a sequence. Then it prints the seconds to load an adapter, of the first request with one, and of
the first with another sum.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import partial
from pathlib import Path

from splitc.compiler import Request, compile_model, plan_model
from splitc.runtime import Session
from splitc.runtime.cli.terminal import out, table
from splitc.runtime.feeds.asked_shapes import parse_shapes
from splitc.runtime.feeds.fills import make_inputs
from splitc.runtime.generate.feeder import Feeder
from splitc.runtime.generate.signature import find_signature
from splitc.runtime.package.manifest import Slot
from splitc.runtime.requests.sequence import StateSequence
from splitc.runtime.units import format_bytes, format_seconds
from tests.helpers.adapters import random_pairs, write_peft

Run = Callable[[], object]
KINDS = ("without slots", "unused", "used", "merged")
# Tokens before the timed ones.
BEFORE = 64


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="+", type=Path)
    parser.add_argument("--devices", nargs="+", default=["cpu0"])
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--mode", default="layer")
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--shapes", nargs="*", default=[])
    parser.add_argument("--runs", type=int, default=15)
    options = parser.parse_args()
    rows = table("", *KINDS, "unused / without", "used / unused", "merged / without", right=KINDS)
    said = []
    for model in options.models:
        with tempfile.TemporaryDirectory() as place, ExitStack() as stack:
            sessions = open_all(model, Path(place), options, stack)
            adapter = Path(place) / "adapter"
            slotted = sessions[1]
            loading = timed(partial(slotted.adapters.load, "style", adapter))
            feeds = make_inputs(slotted.inputs)
            first = timed(partial(slotted.run, feeds, adapters="style"))
            other = timed(partial(slotted.run, feeds, adapters={"style": 0.5}))
            for name, runs in cases(sessions, options.runs, stack):
                plain, unused, used, merged = measure(runs, options.runs)
                ratios = (unused / plain, used / unused, merged / plain)
                times = map(format_seconds, (plain, unused, used, merged))
                rows.add_row(f"{model.parent.name}: {name}", *times, *(f"{ratio:.3f}" for ratio in ratios))
            held = format_bytes(slotted.adapters["style"].bytes)
            seconds = [format_seconds(one) for one in (loading, first, other)]
            said.append(
                f"{model.parent.name}: {len(slotted.manifest.slots)} slots; an adapter of {held} is loaded in "
                f"{seconds[0]}, the first request with it takes {seconds[1]}, the first with another sum {seconds[2]}"
            )
    out.print(rows)
    out.print("\n".join(said))


def open_all(model: Path, place: Path, options: argparse.Namespace, stack: ExitStack) -> list[Session]:
    """Sessions without slots, with slots, and with a random adapter for all of them merged."""
    common = {"split_mode": options.mode, "shapes": parse_shapes(options.shapes) if options.shapes else None}
    slotted = plan_model(model, options.devices, Request(**common, lora_slots=options.rank))
    sizes = {name_of(slot): (slot.inputs, slot.outputs) for slot in slotted.analysis.slots}
    adapter = write_peft(place / "adapter", random_pairs(sizes, options.rank, size=0.02))
    plans = {
        "plain": plan_model(model, options.devices, Request(**common)),
        "slotted": slotted,
        "merged": plan_model(model, options.devices, Request(**common, lora=[(str(adapter), 1.0)])),
    }
    for name, plan in plans.items():
        compile_model(plan, place / name, threads=options.threads, verify=False)
    return [stack.enter_context(Session(place / name)) for name in plans]


def name_of(slot: Slot) -> str:
    return slot.names[0].strip("/").replace("/", ".")


def cases(sessions: list[Session], count: int, stack: ExitStack) -> Iterator[tuple[str, list[Run]]]:
    """Cases: their names, and a run of each session."""
    plain, slotted, merged = sessions
    feeds = make_inputs(plain.inputs)
    alone: list[Run] = [partial(session.run, feeds) for session in sessions]
    yield "a request", [alone[0], alone[1], partial(slotted.run, feeds, adapters="style"), alone[2]]
    if not plain.manifest.states:
        return
    feeder = Feeder(plain.manifest, find_signature(plain.manifest))
    runs: list[Run] = []
    for session, adapters in ((plain, None), (slotted, None), (slotted, "style"), (merged, None)):
        sequence = stack.enter_context(session.start(BEFORE + count + 8, adapters=adapters))
        sequence.run(feeder.feeds([5] * BEFORE, BEFORE))
        runs.append(partial(step, sequence, feeder, iter(range(BEFORE + 1, BEFORE + count + 8))))
    yield f"a token after {BEFORE}", runs


def step(sequence: StateSequence, feeder: Feeder, totals: Iterator[int]) -> object:
    """Run the next token of a sequence."""
    return sequence.run(feeder.feeds([5], next(totals)))


def timed(run: Run) -> float:
    start = time.perf_counter()
    run()
    return time.perf_counter() - start


def measure(runs: list[Run], count: int) -> list[float]:
    """The median seconds of each function, run in turns."""
    seconds: list[list[float]] = [[] for _ in runs]
    for number in range(count + 2):
        for times, run in zip(seconds, runs, strict=True):
            took = timed(run)
            if number > 1:
                times.append(took)
    return [statistics.median(times) for times in seconds]


if __name__ == "__main__":
    main()
