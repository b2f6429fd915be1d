"""Experts and tables placed on a second device, compared with one device and with layer mode.

    python -m tests.benchmarks.placement [--runs 20] [--form loop ...]
    python -m tests.benchmarks.placement --devices cuda0,cpu0

A mixture of 8 experts, of which a token uses 2, after a table of 32,000 rows, in the forms of --form. For one token and
for 64: the time of a request, and the time between the outputs of a stream with four in flight, for each way to place
weights. The ways take turns, so that they see the same load of the machine. On CPU devices each way has two threads in
all. At the end it prints what each device is predicted to hold, and the bytes that cross in a run.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import numpy as np

from splitc.compiler import Plan, Request, compile_model, plan_model
from splitc.compiler.request.places import ExpertsPlace, Place
from splitc.runtime import Session
from splitc.runtime.cli.terminal import out, table
from splitc.runtime.units import format_bytes, format_seconds
from tests.conftest import Arrays
from tests.helpers.mixtures import FORMS, Sizes, save_mixture

SIZES = Sizes(rows=32000, wide=512, inner=1024, experts=8, chosen=2)
LAYERS, LENGTHS, IN_FLIGHT, ROUND = 4, (1, 64), 4, 12


@dataclass(frozen=True)
class Way:
    """A package in a session."""

    plan: Plan
    session: Session


def _ways(first: str, second: str) -> dict[str, tuple[list[str], Request]]:
    """The devices and the request of each way."""
    return {
        "one device": ([first], Request(split_mode="layer")),
        "layer on 2": ([first, second], Request(split_mode="layer", spread=True)),
        f"experts on {second}": ([first, second], Request(split_mode="layer", experts=ExpertsPlace(second))),
        f"table on {second}": ([first, second], Request(split_mode="layer", place=(Place("^table$", second),))),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=20)
    parser.add_argument("--form", nargs="*", default=["loop", "fused"], choices=FORMS)
    parser.add_argument("--devices", default="cpu0,cpu1", help="where all is, and where experts or the table are put")
    options = parser.parse_args()
    columns = [f"{length} {what}" for length in LENGTHS for what in ("a request", "in a stream")]
    times = table("form", "way", *columns, right=columns)
    held = table("form", "way", "rank 0", "rank 1", "crosses", right=("rank 0", "rank 1", "crosses"))
    for form in options.form:
        with tempfile.TemporaryDirectory(prefix="splitc-placement-") as name, ExitStack() as stack:
            ways = _open(stack, save_mixture(Path(name), form, LAYERS, SIZES), options.devices.split(","))
            measured = {length: _measure(ways, length, options.runs) for length in LENGTHS}
            for title, way in ways.items():
                shown = [format_seconds(seconds) for length in LENGTHS for seconds in measured[length][title]]
                times.add_row(form, title, *shown)
                weights = [format_bytes(rank.memory.total) for rank in way.plan.ranks]
                crossing = format_bytes(sum(cut.bytes for cut in way.plan.cuts))
                held.add_row(form, title, *weights, *[""] * (2 - len(weights)), crossing)
    out.print(times)
    out.print(held)


def _open(stack: ExitStack, model: Path, places: Sequence[str]) -> dict[str, Way]:
    ways = {}
    for number, (title, (devices, request)) in enumerate(_ways(*places).items()):
        plan = plan_model(model, devices, request)
        package = model.with_name(f"package{number}")
        compile_model(plan, package, verify=False)
        threads = 2 // len(plan.ranks) if places[0].startswith("cpu") else None
        session = Session(package, threads=threads, in_flight=IN_FLIGHT, verify="never")
        ways[title] = Way(plan, stack.enter_context(session))
    return ways


def _measure(ways: Mapping[str, Way], length: int, runs: int) -> dict[str, Sequence[float]]:
    """The median seconds of a request, and between those of a stream, for each way."""
    generator = np.random.default_rng(0)
    feeds: list[Arrays] = [{"ids": generator.integers(0, SIZES.rows, (1, length))} for _ in range(ROUND)]
    alone: dict[str, list[float]] = {title: [] for title in ways}
    stream: dict[str, list[float]] = {title: [] for title in ways}
    for number in range(runs + 1):
        for title, way in ways.items():
            begin = time.perf_counter()
            way.session.run(feeds[number % ROUND])
            middle = time.perf_counter()
            for _ in way.session.map(feeds):
                pass
            if number:
                alone[title].append(middle - begin)
                stream[title].append((time.perf_counter() - middle) / ROUND)
    return {title: (median(alone[title]), median(stream[title])) for title in ways}


if __name__ == "__main__":
    main()
