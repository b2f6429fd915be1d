"""The part of a manifest's schema for engines that are built on the target machine."""

from __future__ import annotations

from msgspec import Struct


class BuildOptions(Struct, frozen=True):
    """How TensorRT builds engines; None is TensorRT's default. `workspace` is in bytes.

    `tactic_sources` are names of trt.TacticSource. With `strip_weights` an engine reads its weights from its source.
    """

    optimization_level: int | None = None
    workspace: int | None = None
    version_compatible: bool = False
    hardware_compatible: bool = False
    weight_streaming: bool = False
    strip_weights: bool = False
    tactic_sources: list[str] | None = None


class Built(Struct, frozen=True):
    """What built the engines: TensorRT's version, and the name and compute capability of the GPU, if one was used."""

    version: str
    gpu: str | None = None
    compute_capability: str | None = None


class Build(Struct, frozen=True):
    """How a package's engines are built, and what built them (None: not built yet)."""

    options: BuildOptions
    built: Built | None = None
