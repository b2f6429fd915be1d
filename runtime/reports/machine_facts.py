"""The machine and the versions that a page was made with."""

from __future__ import annotations

import platform
from collections.abc import Iterator
from datetime import datetime, timezone
from importlib import metadata
from pathlib import Path

from splitc.runtime.hardware.devices import cores, host_memory
from splitc.runtime.hardware.gpus import list_gpus
from splitc.runtime.units import format_bytes
from splitc.runtime.version import VERSION

# What decides how fast a package is, by the names of its distributions.
LIBRARIES = {
    "ONNX Runtime": ("onnxruntime-gpu", "onnxruntime"),
    "TensorRT": ("tensorrt",),
    "TensorRT-RTX": ("tensorrt-rtx-cu13",),
    "NumPy": ("numpy",),
}


def machine_facts() -> list[str]:
    """The machine's parts, then versions, then the time."""
    gpus = [f"{gpu.name}, {format_bytes(gpu.total_bytes)}" for gpu in list_gpus()]
    machine = [_processor(), f"{cores()} cores", f"{format_bytes(host_memory()[0])} of memory", *gpus]
    versions = [
        f"splitc {VERSION}",
        f"Python {platform.python_version()}",
        *_libraries(),
        platform.platform(terse=True),
    ]
    return [*machine, *versions, datetime.now(timezone.utc).strftime("%Y-%m-%d %H:%M UTC")]


def _libraries() -> Iterator[str]:
    for name, distributions in LIBRARIES.items():
        for distribution in distributions:
            try:
                yield f"{name} {metadata.version(distribution)}"
                break
            except metadata.PackageNotFoundError:
                continue


def _processor() -> str:
    """The processor's name as Linux gives it, or else as Python does."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    named = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(named, platform.processor() or platform.machine())
