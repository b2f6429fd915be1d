"""Random plans with budgets near the prediction: each must run within its budgets, or be refused.

    python -m tests.benchmarks.memory_plans CORPUS --plans 300 --seed 0

CORPUS has a folder for each model, with model.onnx and inputs.npz. Each plan has a random model, mode, two or three CPU
devices, a factor for one symbol of the inputs' shapes, or for none, and a budget from 0.8 to 1.3 times the fullest
rank's prediction. Each rank runs in a process of its own, with its limit. Prints a line for each plan that needs more
than its budget, or fails, and at the end the counts.
"""

from __future__ import annotations

import argparse
import random
import tempfile
import time
from collections import Counter
from contextlib import suppress
from functools import partial
from pathlib import Path

import numpy as np
import onnx_ir as ir

from splitc.compiler import Request, compile_model, plan_model
from splitc.runtime import Session
from splitc.runtime.cli.run_options import measure_ranks
from splitc.runtime.errors import DoesNotFitError, SplitcError
from splitc.runtime.feeds.fills import make_inputs
from splitc.runtime.units import format_bytes

MODES = ("layer", "layer", "tensor", "row", "batch", "auto")
FACTORS = (2, 4, 8)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("corpus", type=Path)
    parser.add_argument("--plans", type=int, default=300)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--first", type=int, default=0, help="the first of the plans to run: those before are drawn only"
    )
    parser.add_argument("--seconds", type=float, default=float("inf"), help="end after these")
    options = parser.parse_args()
    draw = random.Random(options.seed)
    models = sorted(path.parent for path in options.corpus.glob("*/inputs.npz"))
    counts, ratios, end = Counter[str](), [], time.monotonic() + options.seconds
    for number in range(options.plans):
        if time.monotonic() > end:
            break
        model = draw.choice(models)
        mode, count, threads, share = draw.choice(MODES), draw.randint(2, 3), draw.randint(1, 2), draw.uniform(0.8, 1.3)
        shapes = draw_shapes(model, draw)
        what = f"{number} {model.name} {mode} on {count}, {threads} threads, {share:.2f}, {shapes}"
        if number < options.first:
            continue
        result, own = run_plan(model / "model.onnx", mode, count, threads, share, shapes)
        counts[result.split(":")[0]] += 1
        ratios += own
        if not result.startswith(("fits", "refused", "no plan")):
            print(what, result, sep=": ", flush=True)
    print(dict(counts))
    if ratios:
        print("predicted / measured:", *(f"{ratio:.2f}" for ratio in np.quantile(ratios, (0, 0.05, 0.5, 0.95, 1))))


def draw_shapes(model: Path, draw: random.Random) -> dict[str, tuple[int, ...]]:
    """The shapes of the inputs beside the model, with the size of one symbol, or of none, times a factor."""
    inputs = {value.name or "": value.shape for value in ir.load(model / "model.onnx").graph.inputs}
    symbols = sorted(
        {axis.value for axes in inputs.values() for axis in axes or () if isinstance(axis, ir.SymbolicDim)}, key=str
    )
    larger, factor = draw.choice([None, *symbols]), draw.choice(FACTORS)
    with np.load(model / "inputs.npz") as arrays:
        return {
            name: tuple(
                size * (factor if larger and axis == larger else 1)
                for axis, size in zip(axes, arrays[name].shape, strict=False)
            )
            for name, axes in inputs.items()
            if name in arrays and axes is not None
        }


def run_plan(
    model: Path, mode: str, count: int, threads: int, share: float, shapes: dict[str, tuple[int, ...]]
) -> tuple[str, list[float]]:
    """The result of the plan with a budget of this share of its prediction, and predicted / measured of its ranks."""
    devices = [f"cpu{number}" for number in range(count)]
    try:
        free = plan_model(model, devices, Request(split_mode=mode, shapes=shapes))
    except SplitcError as error:
        return f"no plan: {error}", []
    budget = int(share * max(rank.memory.total for rank in free.ranks))
    try:
        plan = plan_model(model, devices, Request(split_mode=mode, shapes=shapes, memory=[str(budget)]))
    except DoesNotFitError:
        return "refused", []
    except SplitcError as error:
        return f"no plan: {error}", []
    with tempfile.TemporaryDirectory() as folder:
        try:
            compile_model(plan, Path(folder) / "package", verify=False)
            load = partial(Session, Path(folder) / "package", threads=threads)
            with load() as session:
                measured = measure_ranks(load, session, make_inputs(session.inputs, 0, {}))
        except SplitcError as error:
            with suppress(SplitcError):  # sizes that do not go together fail unsplit too
                compile_model(free, Path(folder) / "free", verify=False)
                with Session(Path(folder) / "free", threads=threads) as session:
                    session.run(make_inputs(session.inputs, 0, {}))
                return f"fails: {error}", []
            return "no plan: it does not run on these sizes", []
    ratios = [rank.predicted_total / max(1, rank.peak) for rank in measured]
    if beyond := [rank for rank in measured if rank.peak > budget]:
        worst = max(beyond, key=lambda rank: rank.peak)
        sizes = tuple(map(format_bytes, (worst.peak, budget, worst.predicted_total)))
        return "exceeds: {} of {}, predicted {}".format(*sizes), ratios
    return "fits", ratios


if __name__ == "__main__":
    main()
