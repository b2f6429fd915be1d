"""The backend that loads a package's engines on a device."""

from __future__ import annotations

from splitc.runtime.engines import Backend
from splitc.runtime.engines.entries import load_entry
from splitc.runtime.engines.kind import BackendOptions
from splitc.runtime.engines.kinds import find_kind
from splitc.runtime.hardware.devices import Device
from splitc.runtime.package.manifest import Build, BuildOptions


def make_backend(
    engine: str,
    device: Device,
    threads: int,
    build: Build | None = None,
    cuda_graphs: bool = True,
    trusts_data: bool = False,
) -> Backend:
    """The backend for this kind of engine on the device. `threads` are those of a CPU device.

    Raises PackageError if the GPU or a library is missing.
    """
    kind = find_kind(engine)
    building = BuildOptions() if build is None else build.options
    options = BackendOptions(kind, device, threads, building, cuda_graphs, trusts_data)
    backend: Backend = load_entry(kind.backends[device.kind]).create(options)
    return backend
