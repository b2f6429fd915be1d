"""The time of a compile compared with copying the model, and of a load compared with reading the package once.

    python -m tests.benchmarks.compiling [--size 4GB] [--devices 4xcpu] [--modes layer tensor] [--folder .] [--repeat 3]

Each is done with the files in the system's cache (warm), and after they were dropped from it (cold). All take turns
`--repeat` times, and the least seconds count: wall time, and the time of all cores. The folder's disk needs space for
three times the size.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from models.llama import Size, build, save_sparse
from splitc.runtime.cli.terminal import out, table
from splitc.runtime.units import format_bytes, format_seconds, parse_bytes

# The bytes of a block of the decoder, and the weights before and after the blocks.
SIZE = Size(hidden=4096, heads=32, kv_heads=8, feed_forward=14336, vocabulary=32000)
BLOCK, REST = 872_448_000, 1_048_592_384
# The bytes that are made at a time: few, since this process's peak also counts for the processes that it starts.
PIECE = 4 << 20
LOAD = """
import sys, time
from splitc.runtime import Session
start, used = time.perf_counter(), time.process_time()
with Session(sys.argv[1], verify=sys.argv[2]):
    print(time.perf_counter() - start, time.process_time() - used)
"""


@dataclass(frozen=True)
class Took:
    """A task's wall seconds, its seconds on all cores, and its peak memory in bytes."""

    wall: float
    cores: float
    peak: int


Task = Callable[[], Took]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", type=parse_bytes, default=parse_bytes("4GB"))
    parser.add_argument("--devices", default="4xcpu")
    parser.add_argument("--modes", nargs="*", default=["layer", "tensor"])
    parser.add_argument("--folder", type=Path, default=Path())
    parser.add_argument("--repeat", type=int, default=3)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="splitc-compiling-", dir=options.folder) as place:
        folder = Path(place)
        model = _make_model(folder / "model" / "model.onnx", options.size)
        rows = table(
            format_bytes(_bytes(model.parent)),
            *("warm", "on all cores", "cold", "on all cores", "peak memory"),
            right=("warm", "on all cores", "cold"),
        )
        tasks: dict[str, Task] = {"copy the model": lambda: _run(["cp", "-r", str(model.parent), str(folder / "copy")])}
        for mode in options.modes:
            tasks[f"compile, {mode}"] = partial(_compile, mode, options.devices, model, folder / "package")
        _in_turns(tasks, model.parent, [folder / "copy", folder / "package"], options.repeat, rows)
        for mode in options.modes:
            _compile(mode, options.devices, model, folder / "package")
            _in_turns(_loads(mode, folder / "package", folder / "cache"), folder / "package", [], options.repeat, rows)
            shutil.rmtree(folder / "package")
    out.print(rows)


def _make_model(path: Path, size: int) -> Path:
    """A decoder of about this size, with bytes that are not zero."""
    save_sparse(build(Size(**{**vars(SIZE), "layers": max(1, round((size - REST) / BLOCK))})), path)
    noise = np.random.default_rng(0).integers(0, 60, PIECE, np.uint8).tobytes()
    data = path.with_name(f"{path.name}.data")
    total = data.stat().st_size
    with data.open("r+b") as file:
        for start in range(0, total, PIECE):
            file.write(noise[: total - start])
    return path


def _compile(mode: str, devices: str, model: Path, package: Path) -> Took:
    command = ["compile", str(model), "-o", str(package), "-d", devices, "--no-verify", "--split-mode", mode]
    return _run([sys.executable, "-m", "splitc.runtime", *command])


def _loads(mode: str, package: Path, cache: Path) -> dict[str, Task]:
    """Read a package, and load it for the first time, again, and without comparing its files."""
    _load(package, "once", cache)
    loads = {"first": "always", "second": "once", "unverified": "never"}
    return {
        f"read the package, {mode}": lambda: _run(["cat", *map(str, _files(package))]),
        **{f"load, {which}": partial(_load, package, verify, cache) for which, verify in loads.items()},
    }


def _load(package: Path, verify: str, cache: Path) -> Took:
    """Load a package in a new process, whose start is not counted."""
    said = package.with_name("said")
    took = _run([sys.executable, "-c", LOAD, str(package), verify], {"XDG_CACHE_HOME": str(cache)}, said)
    wall, cores = map(float, said.read_text().split())
    return Took(wall, cores, took.peak)


def _in_turns(tasks: Mapping[str, Task], reads: Path, makes: Sequence[Path], repeat: int, rows: Any) -> None:
    """Add a row for each task: the least of its seconds with its files in the cache, and without."""
    found: dict[tuple[str, bool], list[Took]] = {}
    for _ in range(repeat):
        for cold in (False, True):
            for name, task in tasks.items():
                _prepare(reads, cold)
                found.setdefault((name, cold), []).append(task())
                for made in makes:
                    shutil.rmtree(made, ignore_errors=True)
    for name in tasks:
        took = [found[name, cold] for cold in (False, True)]
        least = [format_seconds(min(seconds)) for each in took for seconds in zip(*((t.wall, t.cores) for t in each))]
        rows.add_row(name, *least, format_bytes(max(t.peak for each in took for t in each)))


def _prepare(folder: Path, cold: bool) -> None:
    """Wait for pending writes, and drop the folder's files from the system's cache, or read them into it."""
    os.sync()
    if not cold:
        _read(folder)
        return
    for path in _files(folder):
        with path.open("rb") as file:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def _read(folder: Path) -> None:
    buffer = bytearray(1 << 20)
    for path in _files(folder):
        with path.open("rb", buffering=0) as file:
            while file.readinto(buffer):
                pass


def _run(command: Sequence[str], environment: Mapping[str, str] = os.environ, output: Path = Path(os.devnull)) -> Took:
    """Run a command. Its output goes to a file."""
    start = time.perf_counter()
    with (
        output.open("wb") as file,
        subprocess.Popen(command, env={**os.environ, **environment}, stdout=file) as process,
    ):
        _, status, used = os.wait4(process.pid, 0)
        wall = time.perf_counter() - start
        process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        raise SystemExit(f"{' '.join(command[:4])} failed")
    return Took(wall, used.ru_utime + used.ru_stime, used.ru_maxrss << 10)


def _files(folder: Path) -> Iterable[Path]:
    return (path for path in folder.rglob("*") if path.is_file())


def _bytes(folder: Path) -> int:
    return sum(path.stat().st_size for path in _files(folder))


if __name__ == "__main__":
    main()
