"""A pipeline's steps with its denoiser on several CPU devices, compared with one device and the unsplit pipeline.

    .venv/diffusers/bin/python -m tests.benchmarks.denoiser [--kind sd] [--devices 2] [--modes tensor] [--steps 20]

The environment is that of `make test-diffusers`. The pipelines have made-up weights, and compute latents in turns. They
are opened as users do: packages by `splitc.runtime.integrations.diffusers.load`, the unsplit models by optimum.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import onnxruntime as ort
import torch
from optimum.exporters.onnx import main_export
from optimum.onnxruntime import ORTDiffusionPipeline

from models.diffusion import KINDS, Size, make
from splitc.compiler import Request, compile_pipeline, plan_pipeline
from splitc.runtime.cli.terminal import out, table
from splitc.runtime.hardware.devices import cores
from splitc.runtime.integrations.diffusers import load
from splitc.runtime.units import format_seconds


@dataclass(frozen=True)
class Timed:
    """A pipeline, and its seconds of each run."""

    name: str
    threads: str
    draw: Callable[[], Any]
    seconds: list[float]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kind", choices=KINDS, default="sd")
    parser.add_argument("--width", type=int, default=64, help="of the denoiser's narrowest layer")
    parser.add_argument("--depth", type=int, default=4)
    parser.add_argument("--image", type=int, default=64, help="height and width in pixels")
    parser.add_argument("--devices", type=int, default=2)
    parser.add_argument("--modes", nargs="*", default=["tensor"])
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="splitc-denoiser-") as place:
        folder = Path(place)
        make(options.kind, Size(options.width, options.depth, options.image)).save_pretrained(folder / "torch")
        main_export(str(folder / "torch"), folder / "onnx", task="text-to-image", do_validation=False)
        _compare(folder, options)


def _compare(folder: Path, options: argparse.Namespace) -> None:
    timed = _pipelines(folder, options)
    expected = timed[0].draw()
    worst = {each.name: float(np.abs(each.draw() - expected).max()) for each in timed}
    for _ in range(options.rounds):
        for each in timed:
            begin = time.perf_counter()
            each.draw()
            each.seconds.append(time.perf_counter() - begin)
    found = table("pipeline", "threads", "seconds", "a step", "/ first", "difference", right=("seconds", "a step"))
    first = median(timed[0].seconds)
    for each in timed:
        took = median(each.seconds)
        step = format_seconds(took / options.steps)
        found.add_row(each.name, each.threads, f"{took:.2f}", step, f"{took / first:.2f}", f"{worst[each.name]:.1e}")
    out.print(f"{options.kind}: {options.steps} steps, median of {options.rounds}; difference is that of latents")
    out.print(found)


def _pipelines(folder: Path, options: argparse.Namespace) -> list[Timed]:
    """The unsplit pipeline, then packages: on one device with its own threads or with all threads, and split."""
    all_cores, count = cores(), options.devices
    share = max(1, all_cores // count)

    def timed(name: str, threads: str, pipeline: Any) -> Timed:
        return Timed(name, threads, lambda: _draw(pipeline, options), [])

    session_options = ort.SessionOptions()
    session_options.intra_op_num_threads = all_cores
    whole = ORTDiffusionPipeline.from_pretrained(folder / "onnx", session_options=session_options)
    made = [timed("unsplit", str(all_cores), whole)]
    _compile(folder, "one", ["cpu0"], Request())
    made += [timed("one device", f"{each}", load(folder / "one", threads=each)) for each in sorted({share, all_cores})]
    devices = "&".join(f"cpu{number}" for number in range(count))
    for mode in options.modes:
        _compile(folder, mode, [f"diffusion={devices}", "cpu0"], replace(Request(), split_mode=f"diffusion={mode}"))
        made.append(timed(f"{count} devices, {mode}", f"{count} x {share}", load(folder / mode, threads=share)))
    return made


def _compile(folder: Path, name: str, devices: list[str], request: Request) -> None:
    compile_pipeline(plan_pipeline(folder / "onnx", devices, request), folder / name)


def _draw(pipeline: Any, options: argparse.Namespace) -> Any:
    """Latents: the image is not decoded."""
    pipeline.set_progress_bar_config(disable=True)
    return pipeline(
        "a cat on a mat",
        height=options.image,
        width=options.image,
        num_inference_steps=options.steps,
        generator=torch.Generator().manual_seed(0),
        output_type="latent",
    ).images.numpy()


if __name__ == "__main__":
    main()
