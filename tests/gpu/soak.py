"""Many loads and many steps of a decoder whose ranks sum in each layer: none hangs, and all give the same.

    python -m tests.gpu.soak --devices 2xcuda --loads 100 --steps 1000

Each load decodes from the same tokens, as CUDA graphs as soon as these are recorded. A load that takes longer than
--patience ends the program with the stacks of all threads.
"""

from __future__ import annotations

import argparse
import faulthandler
import tempfile
import time
from pathlib import Path

import numpy as np
import onnx_ir as ir

from models.llama import Size
from models.llama_fused import build
from models.writer import save
from splitc.compiler import Request, compile_model, plan_model
from splitc.runtime import Session


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--devices", default="2xcuda")
    parser.add_argument("--loads", type=int, default=100)
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--patience", type=float, default=60.0)
    parser.add_argument("--mode", default="tensor")
    options = parser.parse_args()
    dtype = ir.DataType.FLOAT if "cpu" in options.devices else ir.DataType.FLOAT16
    size = Size(layers=2, hidden=512, heads=8, kv_heads=4, feed_forward=1024, vocabulary=1000, dtype=dtype)
    start = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="splitc-soak-") as folder:
        model, package = Path(folder) / "model.onnx", Path(folder) / "package"
        save(build(size), model)
        request = Request(split_mode=options.mode, engine="onnxruntime", spread=True)
        compile_model(plan_model(model, [options.devices], request), package, verify=False)
        first = None
        for load in range(options.loads):
            if load % 10 == 0:
                print(f"{options.devices}: {load} loads in {time.monotonic() - start:.0f} s", flush=True)
            faulthandler.dump_traceback_later(options.patience, exit=True)
            logits = _decode(package, options.steps, size)
            first = logits if first is None else first
            if not np.array_equal(logits, first):
                raise SystemExit(f"load {load} gave other logits")
        faulthandler.cancel_dump_traceback_later()
    steps = options.loads * options.steps
    print(f"{options.devices}: {options.loads} loads, {steps} steps, {time.monotonic() - start:.0f} s, all alike")


def _decode(package: Path, steps: int, size: Size) -> np.ndarray:  # type: ignore[type-arg]
    """The last logits of a number of steps in a new session."""
    room = 64
    with Session(package, verify=False) as session, session.start(capacity=room) as sequence:
        token, logits = 1, None
        for step in range(steps):
            mask = (np.arange(room) <= step % room).astype(np.int64)[None]
            logits = sequence.run({"input_ids": np.array([[token]]), "attention_mask": mask})["logits"]
            token = int(logits[0, -1].argmax())
        if session.notes:
            raise SystemExit(f"not replayed: {session.notes}")
        assert logits is not None
        return logits


if __name__ == "__main__":
    main()
