"""Many loads and many steps of a decoder in tensor mode: none hangs, and all give the same logits.

    python -m tests.gpu.soak --devices 2xcuda --loads 100 --steps 1000
    python -m tests.gpu.soak --devices 2xcpu --ranks processes --loads 5 --steps 100      # the same, without a GPU

Each load decodes from the same tokens, with CUDA graphs once they are captured. Ranks are of the session's default
kind, or that of --ranks. A load that takes longer than --patience ends the program with the stacks of all threads. At
the end it prints the distribution of the seconds of a load, and of its slowest step.
"""

from __future__ import annotations

import argparse
import faulthandler
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx_ir as ir

from models.llama import Size
from models.llama_fused import build
from models.writer import save
from splitc.compiler import Request, compile_model, plan_model
from splitc.runtime import Session
from splitc.runtime.units import format_seconds


@dataclass(frozen=True)
class Load:
    """A session's last logits, and the seconds of loading, of a step, and of the slowest step."""

    logits: npt.NDArray[Any]
    loading: float
    step: float
    slowest: float


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--devices", default="2xcuda")
    parser.add_argument("--loads", type=int, default=100)
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--patience", type=float, default=60.0)
    parser.add_argument("--mode", default="tensor")
    parser.add_argument("--ranks", choices=["threads", "processes"])
    options = parser.parse_args()
    dtype = ir.DataType.FLOAT if "cpu" in options.devices else ir.DataType.FLOAT16
    size = Size(layers=2, hidden=512, heads=8, kv_heads=4, feed_forward=1024, vocabulary=1000, dtype=dtype)
    start = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="splitc-soak-") as folder:
        model, package = Path(folder) / "model.onnx", Path(folder) / "package"
        save(build(size), model)
        request = Request(split_mode=options.mode, engine="onnxruntime", spread=True)
        compile_model(plan_model(model, [options.devices], request), package, verify=False)
        loads: list[Load] = []
        for number in range(options.loads):
            if number % 10 == 0:
                print(f"{options.devices}: {number} loads in {time.monotonic() - start:.0f} s", flush=True)
            faulthandler.dump_traceback_later(options.patience, exit=True)
            loads.append(_decode(package, options.steps, options.ranks))
            if not np.array_equal(loads[-1].logits, loads[0].logits):
                raise SystemExit(f"load {number} gave other logits")
        faulthandler.cancel_dump_traceback_later()
    _print(loads)
    steps = options.loads * options.steps
    print(f"{options.devices}: {options.loads} loads, {steps} steps, {time.monotonic() - start:.0f} s, all alike")


def _decode(package: Path, steps: int, ranks: str | None) -> Load:
    """Run steps in a new session."""
    room, token, slowest = 64, 1, 0.0
    began = time.perf_counter()
    with Session(package, verify="never", ranks=ranks) as session, ExitStack() as sequences:
        first = last = time.perf_counter()
        for step in range(steps):
            if step % room == 0:  # the one before is full
                sequences.close()
                sequence = sequences.enter_context(session.start(capacity=room))
            mask = (np.arange(room) <= step % room).astype(np.int64)[None]
            logits = sequence.run({"input_ids": np.array([[token]]), "attention_mask": mask})["logits"]
            token = int(logits[0, -1].argmax())
            now = time.perf_counter()
            slowest, last = max(slowest, now - last), now
        if session.notes:
            raise SystemExit(f"not replayed: {session.notes}")
        return Load(logits, first - began, (last - first) / steps, slowest)


def _print(loads: Sequence[Load]) -> None:
    for what in ("loading", "step", "slowest"):
        seconds = [getattr(load, what) for load in loads]
        low, middle, high = (format_seconds(float(each)) for each in np.percentile(seconds, (10, 50, 90)))
        print(f"{what}: 10 % {low}, median {middle}, 90 % {high}, most {format_seconds(max(seconds))}")


if __name__ == "__main__":
    main()
