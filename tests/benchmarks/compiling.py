"""How long a compile takes beside a plain copy of the model, and a load beside reading the package once.

    python -m tests.benchmarks.compiling [--size 4GB] [--devices 4xcpu] [--modes layer tensor] [--folder .]

Each is done with the files in the system's cache (warm), and after they were dropped from it (cold). The folder's disk
needs room for three times the size.
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
from pathlib import Path
from typing import Any

import numpy as np

from models.llama import Size, build, save_sparse
from splitc.runtime.cli.terminal import out, table
from splitc.runtime.units import format_bytes, format_seconds, parse_bytes

# The bytes of a block of the decoder, and the weights before and after the blocks.
SIZE = Size(hidden=4096, heads=32, kv_heads=8, feed_forward=14336, vocabulary=32000)
BLOCK, REST = 872_448_000, 1_048_592_384
PIECE = 64 << 20
LOAD = """
import sys, time
from splitc.runtime import Session
start = time.perf_counter()
with Session(sys.argv[1], verify=sys.argv[2]):
    print(time.perf_counter() - start)
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", type=parse_bytes, default=parse_bytes("4GB"))
    parser.add_argument("--devices", default="4xcpu")
    parser.add_argument("--modes", nargs="*", default=["layer", "tensor"])
    parser.add_argument("--folder", type=Path, default=Path())
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="splitc-compiling-", dir=options.folder) as place:
        folder = Path(place)
        model = _make_model(folder / "model" / "model.onnx", options.size)
        rows = table(f"{format_bytes(_bytes(model.parent))}", "warm", "cold", "peak memory", right=("warm", "cold"))
        rows.add_row("copy the model", *_timed(lambda: _copy(model.parent, folder / "copy"), model.parent), "")
        for mode in options.modes:
            _compare(mode, options.devices, model, folder / mode, rows)
    out.print(rows)


def _make_model(path: Path, size: int) -> Path:
    """A decoder of about this size, of bytes that are no zeros."""
    save_sparse(build(Size(**{**vars(SIZE), "layers": max(1, round((size - REST) / BLOCK))})), path)
    noise = np.random.default_rng(0).integers(0, 60, PIECE, np.uint8).tobytes()
    data = path.with_name(f"{path.name}.data")
    total = data.stat().st_size
    with data.open("r+b") as file:
        for start in range(0, total, PIECE):
            file.write(noise[: total - start])
    return path


def _compare(mode: str, devices: str, model: Path, package: Path, rows: Any) -> None:
    """Compile in one mode, and load the package."""
    command = ["-m", "splitc.runtime", "compile", str(model), "-o", str(package), "-d", devices, "--no-verify"]
    peaks: list[int] = []

    def compile_once() -> None:
        shutil.rmtree(package, ignore_errors=True)
        peaks.append(_run([*command, "--split-mode", mode])[1])

    rows.add_row(f"compile, {mode}", *_timed(compile_once, model.parent), format_bytes(max(peaks)))
    rows.add_row("read the package", *_timed(lambda: _read(package), package), "")
    for what, verify in (("first", "always"), ("second", "once"), ("unverified", "never")):
        peaks.clear()
        with tempfile.TemporaryDirectory() as cache:
            environment = {"XDG_CACHE_HOME": cache}
            if what == "second":
                _run(["-c", LOAD, str(package), verify], environment)
            found = []
            for cold in (False, True):
                _prepare(package, cold)
                said, peak = _run(["-c", LOAD, str(package), verify], environment)
                found.append(format_seconds(float(said)))
                peaks.append(peak)
        rows.add_row(f"load, {what}", *found, format_bytes(max(peaks)))
    shutil.rmtree(package)


def _timed(run: Callable[[], None], reads: Path) -> Sequence[str]:
    """Seconds with the files that it reads in the system's cache, and without."""
    found = []
    for cold in (False, True):
        _prepare(reads, cold)
        start = time.perf_counter()
        run()
        found.append(format_seconds(time.perf_counter() - start))
    return found


def _prepare(folder: Path, cold: bool) -> None:
    """Wait for what is being written, and drop the folder's files from the system's cache, or read them into it."""
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


def _copy(source: Path, target: Path) -> None:
    subprocess.run(["cp", "-r", source, target], check=True)
    shutil.rmtree(target)


def _run(arguments: Sequence[str], environment: Mapping[str, str] = os.environ) -> tuple[str, int]:
    """Run Python. Returns what it printed, and the most bytes of memory that it had."""
    with subprocess.Popen(
        [sys.executable, *arguments], env={**os.environ, **environment}, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        said = process.stdout.read()
        _, status, used = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        raise SystemExit(f"{' '.join(arguments[:3])} failed")
    return said, used.ru_maxrss << 10


def _files(folder: Path) -> Iterable[Path]:
    return (path for path in folder.rglob("*") if path.is_file())


def _bytes(folder: Path) -> int:
    return sum(path.stat().st_size for path in _files(folder))


if __name__ == "__main__":
    main()
