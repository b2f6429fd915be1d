"""Modules of one package on the same GPUs: at the same time, with weights in common, and in turn (--swap).

    python -m tests.gpu.modules --devices 2xcuda --work /tmp/modules
    python -m tests.gpu.modules --devices 2xcpu --layers 2 --hidden 256      # the same, without a GPU

Two modules are the same decoder, the third is another one. Outputs are compared with those of each module alone.
"""

from __future__ import annotations

import argparse
import shutil
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import onnx_ir as ir

from models.llama import Size, save_sparse
from models.llama_fused import build
from splitc.compiler import Request
from splitc.compiler.pipelines.placement import plan_pipeline
from splitc.compiler.pipelines.writer import compile_pipeline
from splitc.runtime import Pipeline, Session
from splitc.runtime.cli.terminal import out, table
from splitc.runtime.hardware.devices import parse_devices
from splitc.runtime.hardware.gpus import list_gpus
from splitc.runtime.units import format_bytes, format_seconds
from tests.gpu.made_weights import make_missing_weights

# By how much each module's hidden size exceeds the option's.
WIDER = {"decoder": 0, "prompts": 0, "other": 512}
TOKENS, RUNS, ROUNDS = 32, 20, 5


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--devices", default="2xcuda")
    parser.add_argument("--modes", default="tensor,layer")
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--hidden", type=int, default=4096)
    parser.add_argument("--work", type=Path, default=Path("/tmp/modules"))
    options = parser.parse_args()
    sizes = {name: _size(options.layers, options.hidden + more) for name, more in WIDER.items()}
    models = options.work / "models"
    for name, size in sizes.items():
        (models / name).mkdir(parents=True, exist_ok=True)
        _write(size, models / name / "model.onnx")
    ranks = "&".join(str(device) for device in parse_devices([options.devices]))
    devices = [f"{name}={ranks}" for name in WIDER]  # otherwise small ones stay whole
    names = ("alone", "at once", "by turns")
    rows = table("mode, way", "differ", *names, "memory of each GPU", "planned", right=names)
    for mode in options.modes.split(","):
        for swap in (False, True):
            _measure(models, options.work / "package", devices, sizes, mode, swap, rows)
    out.print(rows)


def _write(size: Size, model: Path) -> None:
    """A decoder whose weights are drawn once and repeated, as drawing each would take longer than all else."""
    save_sparse(build(size), model)
    model.with_name(f"{model.name}.data").unlink()
    make_missing_weights(model)


def _size(layers: int, hidden: int) -> Size:
    heads = hidden // 64
    return Size(layers, hidden, heads, heads, 3 * hidden, 8000, dtype=ir.DataType.FLOAT16)


def _measure(
    models: Path, package: Path, devices: list[str], sizes: Mapping[str, Size], mode: str, swap: bool, rows: Any
) -> None:
    shutil.rmtree(package, ignore_errors=True)
    plan = plan_pipeline(models, devices, Request(split_mode=mode, spread=True, engine="onnxruntime"), (), swap)
    compile_pipeline(plan, package, verify=False, weights="link")
    feeds = {name: _feeds(size, number) for number, (name, size) in enumerate(sizes.items())}
    alone, expected = [], {}
    for name in WIDER:
        with Session(package, module=name) as session:
            seconds, expected[name] = _time(session, feeds[name])
            alone.append(seconds)
    out.print(f"{mode}{', swap' if swap else ''}: each alone: {', '.join(map(format_seconds, alone))}")
    before = _used()
    with Pipeline(package) as pipeline, ThreadPoolExecutor(len(WIDER)) as pool:
        begin = time.perf_counter()
        at_once = list(pool.map(lambda name: _time(pipeline[name], feeds[name]), WIDER))
        together = time.perf_counter() - begin
        used = [after - first for after, first in zip(_used(), before, strict=True)]
        differ = max(_difference(made, expected[name]) for name, (_, made) in zip(WIDER, at_once, strict=True))
        turns = []
        for _ in range(ROUNDS):
            for name in WIDER:
                begin = time.perf_counter()
                made = pipeline[name].run(feeds[name])
                turns.append(time.perf_counter() - begin)
                differ = max(differ, _difference(made, expected[name]))
    rows.add_row(
        f"{mode}{', swap' if swap else ''}",
        f"{differ:.1e}",
        format_seconds(median(alone)),
        format_seconds(together / RUNS / len(WIDER)),
        format_seconds(median(turns)),
        ", ".join(map(format_bytes, used)),
        ", ".join(format_bytes(each.total) for each in plan.devices),
    )


def _time(session: Session, feeds: Mapping[str, Any]) -> tuple[float, Mapping[str, Any]]:
    seconds = []
    for _ in range(RUNS):
        begin = time.perf_counter()
        made = session.run(feeds)
        seconds.append(time.perf_counter() - begin)
    return median(seconds), made


def _feeds(size: Size, seed: int) -> dict[str, Any]:
    generator = np.random.default_rng(seed)
    caches = {
        f"past_key_values.{layer}.{part}": np.zeros((1, size.kv_heads, 0, size.head), np.float16)
        for layer in range(size.layers)
        for part in ("key", "value")
    }
    ids = generator.integers(0, size.vocabulary, (1, TOKENS))
    return {"input_ids": ids, "attention_mask": np.ones((1, TOKENS), np.int64), **caches}


def _difference(made: Mapping[str, Any], expected: Mapping[str, Any]) -> float:
    """The largest difference of the logits, relative to the largest of them."""
    one, other = (np.asarray(each["logits"], np.float32) for each in (made, expected))
    return float(np.abs(one - other).max() / np.abs(other).max())


def _used() -> list[int]:
    return [gpu.total_bytes - gpu.free_bytes for gpu in list_gpus()]


if __name__ == "__main__":
    main()
