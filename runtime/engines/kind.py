"""The description of a kind of engine, and the options of its backends."""

from __future__ import annotations

import importlib
import importlib.util
import re
from collections.abc import Mapping
from dataclasses import dataclass

from splitc.runtime.engines import operator_library
from splitc.runtime.errors import MisuseError
from splitc.runtime.hardware.devices import Device
from splitc.runtime.package.manifest import BuildOptions


@dataclass(frozen=True)
class EngineKind:
    """One kind of engine.

    - `title`: its name in messages. `on_gpus`: what runs it on GPUs, for messages.
    - `module`: the Python module that runs it. `package`: the pip package of this module.
    - `backends`: the class that loads such engines, as `module:Class`, for each kind of device.
    - `builder`: the compiler's module that builds engines from ONNX files, for one version and one kind of GPU; None if
      engines are the ONNX files themselves.
    - `priority`: the installed kind with the highest priority is the default; None if it is never the default.
    - `collectives_since`: the first version that supports collectives inside engines; () for all, None for none.
    - `shares_weights`: the kinds of devices on which equal weights of a pipeline's modules are stored once.
    - `swaps_weights`: the kinds of devices on which modules can use one buffer for their weights in turn.
    - `uses_operators`: whether collectives inside engines are operators of splitc's own C library.
    """

    name: str
    title: str
    on_gpus: str
    module: str
    package: str
    backends: Mapping[str, str]
    builder: str | None = None
    priority: int | None = None
    collectives_since: tuple[int, ...] | None = None
    shares_weights: frozenset[str] = frozenset()
    swaps_weights: frozenset[str] = frozenset()
    uses_operators: bool = False

    @property
    def is_built(self) -> bool:
        """Whether engines are built from ONNX files; if not, they are the ONNX files."""
        return self.builder is not None

    @property
    def is_installed(self) -> bool:
        """Whether this machine can build and run such engines."""
        return importlib.util.find_spec(self.module) is not None

    @property
    def version(self) -> str | None:
        """The installed version; None if it is not installed."""
        try:
            return str(importlib.import_module(self.module).__version__)
        except ImportError:
            return None

    @property
    def has_collectives(self) -> bool:
        """Whether engines that are built here may have collectives inside."""
        if self.uses_operators and not operator_library.is_built():
            return False
        if not self.collectives_since:
            return self.collectives_since is not None
        version = self.version if self.is_installed else None
        if version is None:
            return False
        return release(version) >= self.collectives_since

    def need_installed(self) -> None:
        """Raise MisuseError, which names the package to install, if such engines can't be built or run here."""
        if not self.is_installed:
            raise MisuseError(f"{self.name} is not installed: pip install {self.package}")


def release(version: str) -> tuple[int, ...]:
    """The numbers of a version, to compare; () for ""."""
    return tuple(int(number) for number in re.findall(r"\d+", version)[:3])


@dataclass(frozen=True)
class BackendOptions:
    """The options of a backend.

    - `threads`: the number of threads of a CPU device.
    - `build`: how the engines were built.
    - `cuda_graphs`: whether requests may be captured as CUDA graphs.
    - `replays`: whether that is expected: then the GPU's stream is non-blocking (see GpuDevice).
    - `trusts_data`: whether external data of ONNX files may lie outside their folders.
    """

    kind: EngineKind
    device: Device
    threads: int
    build: BuildOptions
    cuda_graphs: bool
    trusts_data: bool = False
    replays: bool = True
