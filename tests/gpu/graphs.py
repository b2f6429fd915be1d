"""Outputs, times and memory of packages of any models in a folder, compared with ONNX Runtime, as one table.

    python -m tests.gpu.graphs FOLDER --devices 2xcuda --modes layer,tensor --limit 540
    python -m tests.gpu.graphs FOLDER --devices 4xcuda --modes batch,2xtensor   # two groups with tensor mode inside
    python -m tests.gpu.graphs FOLDER --devices 2xcpu                           # the same, without a GPU

Missing external data is made up from random numbers, and written beside the model. NAME.json beside NAME.onnx may give
the inputs' shapes, and other shapes to run: {"shapes": {"ids": [1, 16]}, "others": [{"ids": [1, 9]}]}.

Each model is compiled for one device, and for each set of devices in each mode. The columns:

- `error`: the largest error of any output, relative to its largest value, compared with the unsplit model in ONNX
  Runtime on the first device, or with --cpu on the CPU.
- Times are median seconds from arrays to arrays, measured in turns. `new`: the first request of one of the other
  shapes; `again`: a request of the planned shapes; then a request of a stream. After each: how many times as fast that
  is as one device, and as the unsplit model with IO binding, which runs one request at a time.
- `predicted`: the plan's time, after `splitc devices --measure`.
- `kept`: the unsplit model, with inputs and outputs that stay on the device.
- Memory is each device's peak while the package is loaded and run.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import shutil
import threading
import time
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import Future, ProcessPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from splitc.compiler import compile_model, plan_model
from splitc.compiler.planning.clock import Prediction
from splitc.runtime import Session
from splitc.runtime.cli.terminal import out, table
from splitc.runtime.hardware.devices import Device, parse_devices
from splitc.runtime.package.manifest_file import read_manifest
from splitc.runtime.units import format_bytes, format_seconds
from tests.gpu.graph_times import (
    AGAIN,
    IN_FLIGHT,
    KEPT,
    NEW,
    ONE,
    STREAM,
    UNSPLIT,
    Measured,
    Row,
    Unsplit,
    make_feeds,
)
from tests.gpu.made_weights import make_missing_weights
from tests.gpu.ways import predicted, way_request

# The rows of each model, by package.
Rows = dict[str, dict[str, Row]]
# A compiled package and its plan's times, or an error.
Made = Mapping[str, Future[tuple[Path, Prediction]]]
START = time.monotonic()


def main() -> None:
    options = _parse()
    rows: Rows = {}
    if options.limit:
        watch = threading.Timer(options.limit, _give_up, [rows])
        watch.daemon = True
        watch.start()
    models = [path for path in sorted(options.folder.glob("*.onnx")) if path.stem in (options.only or [path.stem])]
    places = [[str(device) for device in parse_devices([each])] for each in options.devices]
    split = {f"{mode} on {len(on)}": (mode, on) for on in places for mode in options.modes.split(",")}
    packages = _compile_all(models, {ONE: ("layer", places[0][:1]), **split}, options)
    for model in models:
        rows[model.stem] = {name: Row() for name in (UNSPLIT, KEPT, *packages[model])}
        with rows[model.stem][UNSPLIT].noted():
            _measure(model, packages[model], parse_devices(places[0])[0], options, rows[model.stem])
        _say(f"{model.stem}: measured")
    _print(rows)


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--devices", nargs="+", default=["2xcuda"])
    parser.add_argument("--modes", default="layer,tensor")
    parser.add_argument("--only", nargs="+", help="names of models")
    parser.add_argument("--ranks", choices=["threads", "processes"])
    parser.add_argument("--cpu", action="store_true", help="compare with the unsplit model on the CPU")
    parser.add_argument("--limit", type=float, help="seconds after which what was measured is printed")
    parser.add_argument("--workers", type=int, help="processes that compile")
    return parser.parse_args()


def _compile_all(
    models: list[Path], kinds: Mapping[str, tuple[str, list[str]]], options: argparse.Namespace
) -> dict[Path, Made]:
    """The packages of each model. All are compiled when this returns, so that compiling disturbs no times."""
    made: dict[Path, Made] = {}
    with ProcessPoolExecutor(options.workers, mp_context=multiprocessing.get_context("spawn")) as pool:
        weights = {model: pool.submit(make_missing_weights, model) for model in models}
        for model in models:
            if weights[model].exception() is None:
                _say(f"{model.stem}: {format_bytes(weights[model].result())} of weights made")
            folder = options.folder / "packages" / model.stem
            made[model] = {
                name: pool.submit(_compile, model, folder / name.replace(" ", "-"), *kind)
                for name, kind in kinds.items()
            }
    return made


def _compile(model: Path, package: Path, mode: str, devices: list[str]) -> tuple[Path, Prediction]:
    start = time.monotonic()
    shutil.rmtree(package, ignore_errors=True)
    package.parent.mkdir(parents=True, exist_ok=True)
    shapes = {name: tuple(shape) for name, shape in _shapes(model)[0].items()}
    plan = plan_model(model, devices, way_request(mode, engine="onnxruntime", shapes=shapes))
    compile_model(plan, package, weights="link" if mode == "layer" else "copy", verify=False)
    print(f"{model.stem}, {package.name}: compiled in {time.monotonic() - start:.1f} s", flush=True)
    return package, predicted(plan)


def _shapes(model: Path) -> tuple[dict[str, list[int]], list[dict[str, list[int]]]]:
    """The shapes to plan for, and the other shapes."""
    path = model.with_suffix(".json")
    said: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}
    return said.get("shapes", {}), said.get("others", [])


def _measure(model: Path, packages: Made, device: Device, options: argparse.Namespace, rows: Mapping[str, Row]) -> None:
    """Fill the model's rows. A package that fails is left out of the rest."""
    ready: dict[str, Path] = {}
    for name, future in packages.items():
        with rows[name].noted():
            ready[name], times = future.result()
            rows[name].predicted = {AGAIN: times.latency, STREAM: times.interval}
    if not ready:
        return
    manifest = read_manifest(next(iter(ready.values())))
    feeds = [make_feeds(manifest, shapes) for shapes in ({}, *_shapes(model)[1])]
    unsplit = Unsplit(model, device)
    expected = Unsplit(model, Device("cpu", 0)) if options.cpu else unsplit
    unsplit.run(feeds[0])
    with ExitStack() as stack:
        measured = Measured(unsplit, expected, feeds, rows)
        for name, package in ready.items():
            with rows[name].noted():
                session = stack.enter_context(_load(package, options))
                rows[name].weights = _sizes(rank.weights_bytes for rank in session.manifest.ranks)
                measured.add(name, session)
                # Measured now: later it would include the other packages' memory.
                rows[name].memory = _sizes(each.peak for each in session.device_memory())
        measured.take_times()


@contextmanager
def _load(package: Path, options: argparse.Namespace) -> Iterator[Session]:
    """The package's session. The package is deleted."""
    start = time.monotonic()
    with Session(package, verify="never", in_flight=IN_FLIGHT, ranks=options.ranks) as session:
        _say(f"{package.parent.name}, {package.name}: loaded in {time.monotonic() - start:.1f} s")
        yield session
    shutil.rmtree(package)


def _print(rows: Rows) -> None:
    times = (NEW, AGAIN, STREAM)
    columns = [column for name in times for column in (name, "x one", "x whole", "predicted")]
    right = ("x one", "x whole", "predicted", *times)
    found = table("model", "package", "error", *columns, "weights", "memory", right=right)
    for model, packages in rows.items():
        for name, row in packages.items():
            cells = [cell for each in times for cell in _cells(each, row, packages)]
            error = "" if row.error is None else f"{row.error:.1e} {row.problem}"
            found.add_row(model, name, error, *cells, row.weights, row.memory)
    out.print(found)
    for model, packages in rows.items():
        for name, row in packages.items():
            for note in ([row.failure] if row.failure else []) + row.notes:
                out.print(f"{model}, {name}: {note}", markup=False)


def _cells(what: str, row: Row, packages: Mapping[str, Row]) -> tuple[str, str, str, str]:
    """The time, the speed relative to one device and to the unsplit model, and the prediction."""
    seconds = row.times.get(what)
    if seconds is None:
        return "", "", "", ""
    one, whole = packages[ONE].times.get(what), packages[UNSPLIT].times.get(AGAIN if what == STREAM else what)
    ratios = [f"{other / seconds:.2f}" if other else "" for other in (one, whole)]
    said = row.predicted.get(what)
    return format_seconds(seconds), ratios[0], ratios[1], "" if said is None else format_seconds(said)


def _sizes(sizes: Iterable[int]) -> str:
    return " + ".join(map(format_bytes, sizes))


def _say(text: str) -> None:
    print(f"{time.monotonic() - START:5.0f} s  {text}", flush=True)


def _give_up(rows: Rows) -> None:
    _say("the time is over")
    _print(rows)
    for process in multiprocessing.active_children():
        process.kill()
    os._exit(1)


if __name__ == "__main__":
    main()
