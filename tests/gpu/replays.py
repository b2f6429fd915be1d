"""Runs any models on one GPU and on two ranks, each in a process of its own, with six requests, so that replays happen.

    python -m tests.gpu.replays FOLDER --jobs 4 --limit 560       # FOLDER/NAME/model.onnx, and inputs.npz beside it
    python -m tests.gpu.replays FOLDER --devices cpu0,cpu1        # the same, without a GPU

A model is compiled for one device (`alone`), and for two (`two`) in tensor mode, or in layer mode if tensor mode can't
split it. With one GPU both ranks are on it. Requests have the arrays of inputs.npz, changed each time: floats are
scaled, integers rolled along their last axis. An output is right if it agrees with the unsplit model's in ONNX Runtime
on the same device, or if it differs from that on the CPU at most twice as much as the unsplit model on the device does;
or if it agrees with the model on the CPU without ONNX Runtime's optimizations, which change some halves by percents
(`plain`).

A line has the result, the number of replayed requests, and the largest errors relative to the tolerance: from the
unsplit model on the device, from that on the CPU, and of the former from the latter.
"""

from __future__ import annotations

import argparse
import math
import os
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np

from splitc.compiler import Request, compile_model, plan_model
from splitc.compiler.errors import CannotSplitError, ModelError
from splitc.runtime import Session
from splitc.runtime.arrays.ort_values import run_on_arrays
from splitc.runtime.engines.onnx_session import load_unoptimized
from splitc.runtime.errors import EngineError
from splitc.runtime.hardware.devices import Device, parse_devices
from splitc.runtime.ranks.loop import Replay
from splitc.runtime.ranks.request import Execution
from splitc.runtime.tools.compare import compare
from splitc.runtime.tools.unsplit import CPU, all_feeds, open_unsplit

REQUESTS, PATIENCE = 6, 150.0
WAYS = ("alone", "two")
Arrays = Mapping[str, Any]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--devices", default="cuda0,cuda0", help="those of the two ranks")
    parser.add_argument("--jobs", type=int, default=4)
    parser.add_argument("--only", nargs="+", help="names of models")
    parser.add_argument("--ways", nargs="+", default=WAYS, choices=WAYS)
    parser.add_argument("--limit", type=float, default=3600.0, help="seconds after which no model is begun")
    parser.add_argument("--one", choices=WAYS, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one is not None:
        print(_try(options.folder, options.one, options.devices.split(",")))
        return
    models = sorted(path.parent for path in options.folder.glob("*/model.onnx"))
    wanted = [(each, way) for each in models for way in options.ways if each.name in (options.only or [each.name])]
    end = time.monotonic() + options.limit
    counts: Counter[str] = Counter()
    with ThreadPoolExecutor(options.jobs) as pool:
        tried = [pool.submit(_start, *each, options.devices, end) for each in wanted]
        for (model, way), each in zip(wanted, tried):
            line = each.result()
            counts[line.split()[0]] += 1
            print(f"{model.name:34} {way:6}{line}", flush=True)
    print(", ".join(f"{count} {what}" for what, count in sorted(counts.items())))


def _start(model: Path, way: str, devices: str, end: float) -> str:
    if time.monotonic() > end:
        return "LATE"
    command = [sys.executable, "-m", "tests.gpu.replays", str(model), "--one", way, "--devices", devices]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE)
    except subprocess.TimeoutExpired:
        return "HANG"
    said = done.stdout.strip().splitlines()
    if done.returncode == 0 and said:
        return said[-1]
    return f"CRASH {done.returncode} {(done.stderr.strip().splitlines() or [''])[-1][:400]}"


def _try(folder: Path, way: str, devices: Sequence[str]) -> str:
    """A line of results: how it ended, the number of replayed requests, the largest errors, and notes."""
    given = dict(np.load(folder / "inputs.npz").items())
    model, device = folder / "model.onnx", parse_devices(devices[:1])[0]
    requests = [_varied(given, number) for number in range(REQUESTS)]
    with tempfile.TemporaryDirectory(prefix="splitc-replays-") as scratch:
        try:
            mode = _compile(model, Path(scratch) / "package", given, way, device.kind)
        except ModelError as error:
            return f"REFUSED {str(error)[:120]}"
        with Session(Path(scratch) / "package", devices=devices[: 1 + WAYS.index(way)], verify="never") as session:
            taken = {tensor.name for tensor in (*session.inputs, *session.optional)}
            answers = [session.run_timed({n: a for n, a in each.items() if n in taken}) for each in requests]
            notes, manifest = session.notes, session.manifest
    wholes = [all_feeds(manifest, each) for each in requests]
    right, same = _whole(model, CPU, wholes), _whole(model, device, wholes)
    outputs = [outputs for outputs, _ in answers]
    from_same, own, whole = (
        max((_error(*pair, manifest.number_type) for pair in zip(one, other)), default=math.inf)
        for one, other in ((same, outputs), (right, outputs), (right, same))
    )
    replayed = sum(_is_replayed(served) for _, served in answers)
    most = max(1.0, 2 * whole) if math.isfinite(whole) else 1.0
    verdict = "PASS" if from_same <= 1 or own <= most else "DIFF"
    if verdict == "DIFF" and _agree(_plain(model, wholes), outputs, manifest.number_type):
        verdict = "PASS plain"
    errors = " ".join(f"{each:8.2g}" for each in (from_same, own, whole))
    return f"{verdict} {mode:6} replayed {replayed} {errors}  {notes[0][:200] if notes else ''}"


def _whole(model: Path, device: Device, requests: Sequence[Arrays]) -> list[Arrays]:
    """The outputs of the unsplit model; none if ONNX Runtime does not run it there. Some kernels are for GPUs only."""
    try:
        with open_unsplit(model, device, 4) as run:
            return [run(each) for each in requests]
    except EngineError:
        return []


def _plain(model: Path, requests: Sequence[Arrays]) -> list[Arrays]:
    """The outputs of the unsplit model on the CPU, without optimizations."""
    session = load_unoptimized(model)
    names = [value.name for value in session.get_outputs()]
    taken = [value.name for value in session.get_inputs()]
    return [dict(zip(names, run_on_arrays(session, None, {n: own[n] for n in taken}))) for own in requests]


def _agree(expected: Sequence[Arrays], outputs: Sequence[Arrays], number_type: str) -> bool:
    return all(_error(one, other, number_type) <= 1 for one, other in zip(expected, outputs))


def _is_replayed(served: Mapping[int, Execution]) -> bool:
    return all(isinstance(span.step, Replay) for each in served.values() for span in each.spans)


def _varied(given: Arrays, number: int) -> dict[str, Any]:
    return {
        name: array * array.dtype.type(1 - 0.05 * number)
        if array.dtype.kind == "f"
        else np.roll(array, number, -1)
        if array.ndim > 1
        else array
        for name, array in given.items()
    }


def _compile(model: Path, package: Path, given: Arrays, way: str, kind: str) -> str:
    """The mode in which it was compiled: tensor, or layer if that can't split the model."""
    shapes = {name: array.shape for name, array in given.items()}

    def make(mode: str) -> str:
        request = Request(split_mode=mode, engine="onnxruntime", spread=True, shapes=shapes, memory=("8GiB",))
        plan = plan_model(model, [f"{kind}0"] if way == "alone" else [f"{kind}0", f"{kind}1"], request)
        compile_model(plan, package, verify=False)
        return mode

    try:
        return make("layer" if way == "alone" else "tensor")
    except CannotSplitError:
        return make("layer")


def _error(expected: Arrays, outputs: Arrays, number_type: str) -> float:
    """The largest error of an output, relative to the tolerance."""
    found = compare(expected, outputs, number_type=number_type)
    return max((0.0 if each.passed and not each.allowed else each.relative / (each.allowed or 1e-9)) for each in found)


if __name__ == "__main__":
    main()
    sys.stdout.flush()
    os._exit(0)
