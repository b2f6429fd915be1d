"""The time and memory of one ONNX file on a device, measured in a process of its own."""

from __future__ import annotations

import pickle
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import msgspec
import numpy.typing as npt

from splitc.runtime.engines import Backend, Engine
from splitc.runtime.engines.kinds import ONNXRUNTIME, make_backend
from splitc.runtime.gpu.array import Tape
from splitc.runtime.gpu.device import GpuDevice
from splitc.runtime.hardware.devices import Device
from splitc.runtime.ipc.child_python import last_line, python_command
from splitc.runtime.ranks.recording import capture
from splitc.runtime.threads.failures import Failure, attempt

# Runs that do not count, and those whose median does. A choice: more take longer, of each block.
WARMUP, RUNS = 2, 7
# Replays in a row: a GPU begins the first one some 40 microseconds after the host launches it, and in a request a block
# follows another one at once.
ROW = 8


class EngineCosts(msgspec.Struct, frozen=True):
    """The median seconds of a run, and the bytes at the peak of running: with weights and all that the engine takes.

    On a GPU the run is replayed where that can be, as requests of known shapes are.
    """

    seconds: float
    bytes: int


def measure_engine(
    path: Path, device: Device, threads: int, feeds: Mapping[str, npt.NDArray[Any]], in_place: Mapping[str, str]
) -> EngineCosts:
    """The costs of a file. `in_place` maps outputs to the inputs that they overwrite.

    Raises SplitcError if it does not run.
    """
    with tempfile.TemporaryDirectory(prefix="splitc-measure-") as folder:
        job = Path(folder) / "job"
        # Pickle keeps all number types of arrays.
        job.write_bytes(pickle.dumps((path, device, threads, feeds, in_place), pickle.HIGHEST_PROTOCOL))
        command = python_command(f"from {__name__} import main", "main()", job)
        printed = last_line(command, f"measure a block on {device}")
    return msgspec.json.decode(printed, type=EngineCosts)


def main() -> None:
    """Measure the file of the job that the command line names, and print its costs as JSON."""
    path, device, threads, arrays, in_place = pickle.loads(Path(sys.argv[1]).read_bytes())
    backend = make_backend(ONNXRUNTIME, device, threads)
    backend.attach()
    backend.own_process()
    before = backend.memory()
    engine = backend.load(path)
    _forget_peak()
    feeds = {name: backend.upload(array) for name, array in arrays.items()}
    into = {output: feeds[name] for name, output in in_place.items()}
    seconds = _timed(partial(_run, backend, engine, feeds, into))
    after = backend.memory()
    assert before is not None and after is not None, "of a process with nothing else"
    taken = after.peak - before.now
    if isinstance(backend, GpuDevice) and engine.capture_blocker is None:
        seconds = replay_seconds(backend, partial(engine.run, feeds, into)) or seconds
    print(msgspec.json.encode(EngineCosts(seconds, max(0, taken))).decode())


def _run(backend: Backend, engine: Engine, feeds: Mapping[str, Any], into: Mapping[str, Any]) -> float:
    start = time.perf_counter()
    engine.run(feeds, into)
    backend.wait_all()
    return time.perf_counter() - start


def replay_seconds(gpu: GpuDevice, give: Callable[[], Any]) -> float | None:
    """The GPU's seconds for a replay of the work that `give` launches; None if it can't be captured."""
    captured = attempt(partial(capture, gpu, Tape(), give))
    if isinstance(captured, Failure):
        return None
    graph, _ = captured
    graph.upload(gpu.stream)
    begin, end = gpu.cuda.Event(), gpu.cuda.Event()

    def replay() -> float:
        begin.record(gpu.stream)
        for _ in range(ROW):
            graph.launch(gpu.stream)
        end.record(gpu.stream)
        gpu.wait(end)
        return float(gpu.cuda.get_elapsed_time(begin, end)) / 1e3 / ROW

    return _timed(replay)


def _timed(run: Callable[[], float]) -> float:
    return median([run() for _ in range(WARMUP + RUNS)][WARMUP:])


def _forget_peak() -> None:
    """Reset the peak, on Linux: loading holds a weight twice, which is not part of the run."""
    with suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")
