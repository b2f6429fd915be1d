"""The seconds and the peak memory of `splitc plan` by the number of a decoder's layers, for each split mode.

    python -m tests.benchmarks.planning [--layers 10 20 40 80 160] [--modes layer tensor row auto] [--devices 4xcuda]

The decoders are as wide as one of 70 billion parameters (80 layers: 138 GB), with weights of zeros that take no disk
space. `wall` is the time of the whole command, `processor` that of all its threads together.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import onnx_ir as ir

from models.llama import Size, build, save_sparse
from splitc.runtime.cli.terminal import out, table
from splitc.runtime.units import format_bytes

WIDTH = {"hidden": 8192, "heads": 64, "kv_heads": 8, "feed_forward": 28672, "vocabulary": 32000}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, nargs="+", default=[10, 20, 40, 80, 160])
    parser.add_argument("--modes", nargs="+", default=["layer", "tensor", "row", "auto"])
    parser.add_argument("--devices", default="4xcuda")
    parser.add_argument("--hosts", help="instead of --devices: 8x8xcuda")
    options = parser.parse_args()
    where = ["--hosts", options.hosts] if options.hosts else ["-d", options.devices]
    rows = table("layers", "mode", "wall", "processor", "peak", right=("layers", "wall", "processor", "peak"))
    with tempfile.TemporaryDirectory(prefix="splitc-planning-") as folder:
        for layers in options.layers:
            model = Path(folder) / f"{layers}.onnx"
            save_sparse(build(Size(layers=layers, dtype=ir.DataType.FLOAT16, **WIDTH)), model)
            for mode in options.modes:
                wall, processor, peak = _plan([str(model), *where, "--memory", "80GiB", "--split-mode", mode])
                rows.add_row(str(layers), mode, f"{wall:.1f} s", f"{processor:.1f} s", format_bytes(peak))
    out.print(rows)


def _plan(words: Sequence[str]) -> tuple[float, float, int]:
    """Run `splitc plan`. Returns wall seconds, processor seconds and peak bytes."""
    start = time.perf_counter()
    process = subprocess.Popen([sys.executable, "-m", "splitc.runtime", "plan", *words], stdout=subprocess.DEVNULL)
    _, status, used = os.wait4(process.pid, 0)
    wall = time.perf_counter() - start
    if status:
        raise SystemExit(f"splitc plan {' '.join(words)} failed")
    return wall, used.ru_utime + used.ru_stime, used.ru_maxrss << 10


if __name__ == "__main__":
    main()
