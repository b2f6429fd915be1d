"""The kinds of engines, and which one a package gets where nobody says."""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Sequence

from splitc.runtime.devices import Device
from splitc.runtime.errors import MisuseError

ONNXRUNTIME, TENSORRT, TENSORRT_RTX = "onnxruntime", "tensorrt", "tensorrt-rtx"
ENGINES = (ONNXRUNTIME, TENSORRT, TENSORRT_RTX)
# The Python module of those that are built, and the package that brings it.
MODULES = {TENSORRT: "tensorrt", TENSORRT_RTX: "tensorrt_rtx"}
PACKAGES = {TENSORRT: "tensorrt", TENSORRT_RTX: "tensorrt-rtx-cu13"}


def choose_engine(asked: str | None, devices: Sequence[Device]) -> str:
    """The engine kind that was asked for; else TensorRT where it is installed and all devices are GPUs.

    Raises MisuseError for an unknown kind, and for one that does not run on the devices.
    """
    if asked is None:
        gpus = all(device.kind == "cuda" for device in devices)
        return TENSORRT if gpus and is_installed(TENSORRT) else ONNXRUNTIME
    if asked not in ENGINES:
        raise MisuseError(f"unknown engine '{asked}': there are {', '.join(ENGINES)}")
    others = [str(device) for device in devices if device.kind != "cuda"]
    if asked != ONNXRUNTIME and others:
        raise MisuseError(f"--engine {asked} runs on GPUs (cuda0, ...), and {others[0]} is none: use onnxruntime there")
    return asked


def describe_engine(engine: str) -> str:
    """What runs GPUs' engines of the kind, and why it is not TensorRT."""
    if engine != ONNXRUNTIME:
        return engine
    why = "" if is_installed(TENSORRT) else " (TensorRT is not installed)"
    return f"ONNX Runtime's CUDA provider{why}"


def is_installed(engine: str) -> bool:
    """Whether this machine can build and run engines of the kind."""
    return engine not in MODULES or importlib.util.find_spec(MODULES[engine]) is not None


def has_collectives(engine: str) -> bool:
    """Whether the engines that are built here can exchange values with other ranks' while they run.

    TensorRT's DistCollective came with version 10.16; all releases of TensorRT-RTX that Python has know it.
    """
    if engine == TENSORRT_RTX:
        return True
    if engine != TENSORRT or not is_installed(engine):
        return False
    major, minor = importlib.import_module(MODULES[engine]).__version__.split(".")[:2]
    return (int(major), int(minor)) >= (10, 16)


def need_installed(engine: str) -> None:
    """Raise MisuseError, naming the package that is missing, where engines of the kind can't be built or run."""
    if not is_installed(engine):
        raise MisuseError(f"{engine} is not installed: pip install {PACKAGES[engine]}")
