"""Predicted and measured memory of models, by term, in all split modes.

    python -m tests.benchmarks.memory MODEL.onnx [MODEL.onnx ...] --devices cpu0,cpu1 --shapes input_ids:1x512

Each rank on a CPU device is measured in a process of its own, GPUs in one for each package, after requests of the
planned shapes. A line for each rank: the predicted and the measured memory after loading and at the peak, the part of
the peak that is not accounted for, and predicted / measured of both.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
from functools import partial
from pathlib import Path

import msgspec

from splitc.compiler import Request, compile_model, plan_model
from splitc.runtime import Session
from splitc.runtime.cli.run_options import measure_ranks
from splitc.runtime.cli.terminal import out, table
from splitc.runtime.errors import SplitcError
from splitc.runtime.feeds.asked_shapes import parse_shapes
from splitc.runtime.feeds.fills import make_inputs
from splitc.runtime.hardware.memory_use import RankMemory
from splitc.runtime.units import format_bytes

# Requests before GPUs are measured: eager, captured and replayed.
REQUESTS = 6
SIZES = ("loaded", "predicted", "peak", "predicted", "missing")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="+", type=Path)
    parser.add_argument("--devices", default="cpu0,cpu1")
    parser.add_argument("--modes", default="one,layer,tensor,row")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--shapes", action="append", default=[], help="as for splitc plan")
    parser.add_argument("--measure", type=Path, help="only measure this package, and print it as JSON")
    options = parser.parse_args()
    if options.measure is not None:
        print(msgspec.json.encode(measure(options.measure, options.threads)).decode())
        return
    rows = table("model", "mode", "rank", *SIZES, "loaded", "peak", right=(*SIZES, "loaded", "peak"))
    for model in options.models:
        for mode in options.modes.split(","):
            for rank in _measured(model, mode, options):
                rows.add_row(model.stem, mode, rank.device, *_numbers(rank))
    out.print(rows)


def _measured(model: Path, mode: str, options: argparse.Namespace) -> list[RankMemory]:
    devices = options.devices.split(",")[: 1 if mode == "one" else None]
    request = Request(split_mode="layer" if mode == "one" else mode, shapes=parse_shapes(options.shapes))
    with tempfile.TemporaryDirectory() as folder:
        package = Path(folder) / "package"
        try:
            compile_model(plan_model(model, devices, request), package, verify=False)
        except SplitcError as error:
            out.print(f"{model.stem} {mode}: {str(error).splitlines()[0]}")
            return []
        again = [sys.executable, "-m", "tests.benchmarks.memory", str(model), "--measure", str(package)]
        done = subprocess.run([*again, "--threads", str(options.threads)], check=True, capture_output=True, text=True)
    return msgspec.json.decode(done.stdout.splitlines()[-1], type=list[RankMemory])


def measure(package: Path, threads: int) -> list[RankMemory]:
    """The memory of a package's ranks after requests with made-up inputs."""
    load = partial(Session, package, threads=threads)
    with load() as session:
        feeds = make_inputs(session.inputs, 0, {})
        for _ in range(REQUESTS if session.devices[0].kind == "cuda" else 0):
            session.run(feeds)
        return measure_ranks(load, session, feeds)


def _numbers(rank: RankMemory) -> list[str]:
    sizes = (rank.loaded, rank.predicted_loaded, rank.peak, rank.predicted_total)
    ratios = (rank.predicted_loaded / max(1, rank.loaded), rank.predicted_total / max(1, rank.peak))
    return [*map(format_bytes, (*sizes, rank.unaccounted)), *(f"{ratio:.2f}" for ratio in ratios)]


if __name__ == "__main__":
    main()
