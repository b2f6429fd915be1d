"""Times and memory of models with fused operators, and as exported, as one table.

    python models/denoisers.py unet -o FOLDER/unet.onnx          # and flux; missing weights are made up
    python -m tests.gpu.fused FOLDER --devices cuda0 2xcuda --limit 540
    python -m tests.gpu.fused FOLDER --devices cpu0 2xcpu        # the same, without a GPU, where nothing is fused

NAME.json beside NAME.onnx may give the inputs' shapes: {"shapes": {"ids": [1, 16]}}. A model is compiled for one device
in layer mode, and for several in tensor mode, or in that of --mode. Each package runs in a process of its own, so that
it has the devices alone. Seconds are the median of requests, replayed if possible; memory is each device's peak.
`difference` is the largest difference of both packages' outputs, relative to the output's largest value.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from splitc.compiler import Request, compile_model, plan_model
from splitc.runtime import Session
from splitc.runtime.arrays.files import load_arrays, save_arrays
from splitc.runtime.cli.terminal import out, table
from splitc.runtime.feeds.fills import make_inputs
from splitc.runtime.hardware.devices import parse_devices
from splitc.runtime.ranks.loop import Replay
from splitc.runtime.units import format_bytes, format_seconds
from tests.gpu.made_weights import make_missing_weights

# Requests before the timed ones: eager or captured.
FIRST, TIMED = 6, 10
# The most seconds for a package, from planning to its last request.
PATIENCE = 240.0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--devices", nargs="+", default=["cuda0", "2xcuda"])
    parser.add_argument("--mode", default="tensor", help="for several devices")
    parser.add_argument("--only", nargs="+", help="names of models")
    parser.add_argument("--limit", type=float, default=3600.0, help="seconds after which nothing is begun")
    parser.add_argument("--one", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--unfused", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one is not None:
        print(json.dumps(_measure(options.folder, options.devices, options.mode, options.unfused, options.one)))
        return
    end = time.monotonic() + options.limit
    rows = table("model", "devices", "as written", "fused", "ratio", "memory", "fused", "difference", "fused places")
    for model in sorted(options.folder.glob("*.onnx")):
        if model.stem in (options.only or [model.stem]):
            make_missing_weights(model)
            for devices in options.devices:
                if time.monotonic() < end:
                    row = _compare(model, devices, options.mode)
                    print(*row, sep=" | ", flush=True)  # what is known, if the time runs out
                    rows.add_row(*row)
    out.print(rows)


def _compare(model: Path, devices: str, mode: str) -> list[str]:
    """The model's row for these devices."""
    with tempfile.TemporaryDirectory(prefix="splitc-fused-", dir=model.parent) as scratch:
        files = [Path(scratch) / f"{name}.npz" for name in ("written", "fused")]
        command = [sys.executable, "-m", "tests.gpu.fused", str(model), "--devices", devices, "--mode", mode]
        found = []
        for file, flag in zip(files, (["--unfused"], []), strict=True):
            try:
                done = subprocess.run(
                    [*command, "--one", str(file), *flag], capture_output=True, text=True, timeout=PATIENCE
                )
            except subprocess.TimeoutExpired:
                return [model.stem, devices, f"no result within {PATIENCE:.0f} s{' '.join(['', *flag])}"]
            if done.returncode:
                return [model.stem, devices, (done.stderr.strip().splitlines() or ["?"])[-1][:150]]
            found.append(json.loads(done.stdout.splitlines()[-1]))
        written, fused = found
        return [
            model.stem,
            devices,
            *(format_seconds(each["seconds"]) + ("" if each["replayed"] else " eager") for each in found),
            f"{written['seconds'] / fused['seconds']:.2f}",
            *(each["memory"] for each in found),
            f"{_difference(*files):.1e}",
            fused["places"],
        ]


def _measure(model: Path, devices: Sequence[str], mode: str, unfused: bool, outputs: Path) -> dict[str, Any]:
    """Compile and run one package, whose outputs are written to a file."""
    places = [str(device) for device in parse_devices(devices)]
    path = model.with_suffix(".json")
    said = json.loads(path.read_text())["shapes"] if path.exists() else {}
    shapes = {name: tuple(shape) for name, shape in said.items()}
    mode = "layer" if len(places) == 1 else mode
    request = Request(split_mode=mode, engine="onnxruntime", spread=True, shapes=shapes, no_fuse=unfused)
    plan = plan_model(model, places, request)
    outcomes = plan.analysis.outcomes
    package = outputs.with_suffix("")
    compile_model(plan, package, weights="copy" if mode == "tensor" else "link", verify=False)
    with Session(package, verify="never") as session:
        feeds = make_inputs(session.inputs)
        for _ in range(FIRST):
            session.run(feeds)
        seconds = []
        for _ in range(TIMED):
            start = time.perf_counter()
            made, served = session.run_timed(feeds)
            seconds.append(time.perf_counter() - start)
        save_arrays(outputs, made)
        memory = " + ".join(format_bytes(each.peak) for each in session.device_memory())
        replayed = all(isinstance(span.step, Replay) for each in served.values() for span in each.spans)
    shutil.rmtree(package)
    count = f"{sum(outcome.operator is not None for outcome in outcomes)} of {len(outcomes)}"
    return {"seconds": median(seconds), "memory": memory, "replayed": replayed, "places": count}


def _difference(one: Path, other: Path) -> float:
    pairs = [(array.astype(np.float64), load_arrays(other)[name]) for name, array in load_arrays(one).items()]
    return max(float(np.abs(a - b).max() / np.abs(a).max()) for a, b in pairs)


if __name__ == "__main__":
    main()
    sys.stdout.flush()
    os._exit(0)
