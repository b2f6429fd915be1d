"""What there is to know of a kind of engines, and what its backends are made from."""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Mapping
from dataclasses import dataclass

from splitc.runtime.devices import Device
from splitc.runtime.errors import MisuseError
from splitc.runtime.manifest import BuildOptions


@dataclass(frozen=True)
class EngineKind:
    """One kind of engines.

    - `title`: what people call it. `on_gpus`: what runs it there, for people.
    - `module`: the Python module that runs it. `package`: what pip installs that from.
    - `backends`: by the kind of device the class that loads such engines, as `module:Class`.
    - `builder`: the module of the compiler that builds engines from ONNX files, for one version and one kind of GPU;
      None where engines are the ONNX files themselves.
    - `priority`: where nobody says which kind, the one with the highest is taken; None only where it is asked for.
    - `collectives_since`: the version from which on an engine can exchange values with other ranks' while it runs;
      () is any, None is never.
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

    @property
    def is_built(self) -> bool:
        """Whether such engines are built from ONNX files."""
        return self.builder is not None

    @property
    def is_installed(self) -> bool:
        """Whether this machine can build and run such engines."""
        return importlib.util.find_spec(self.module) is not None

    @property
    def version(self) -> str | None:
        """The version that is installed here; None where none is."""
        try:
            return str(importlib.import_module(self.module).__version__)
        except ImportError:
            return None

    @property
    def has_collectives(self) -> bool:
        """Whether the engines that are built here can exchange values with other ranks' while they run."""
        if not self.collectives_since:
            return self.collectives_since is not None
        version = self.version if self.is_installed else None
        if version is None:
            return False
        count = len(self.collectives_since)
        return tuple(int(number) for number in version.split(".")[:count]) >= self.collectives_since

    def need_installed(self) -> None:
        """Raise MisuseError, naming the package that is missing, where such engines can't be built or run."""
        if not self.is_installed:
            raise MisuseError(f"{self.name} is not installed: pip install {self.package}")


@dataclass(frozen=True)
class BackendOptions:
    """What a backend is made from: `threads` are those of a CPU device, `build` is how its engines were built.

    With `cuda_graphs` requests may be captured as CUDA graphs.
    """

    kind: EngineKind
    device: Device
    threads: int
    build: BuildOptions
    cuda_graphs: bool
