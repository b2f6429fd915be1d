"""The NVIDIA GPUs of this machine, as CuPy sees them; none if CuPy or the driver is missing."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import ModuleType

from splitc.runtime.errors import PackageError

# The message if CuPy is missing.
INSTALL = "GPUs need CuPy: pip install cupy-cuda12x, or cupy-cuda13x for a driver of CUDA 13"


@dataclass(frozen=True)
class GpuInfo:
    """One GPU: its index in CUDA's order, its memory in bytes, and whether it has peer access to each other one."""

    index: int
    name: str
    compute_capability: str
    total_bytes: int
    free_bytes: int
    peers: Mapping[int, bool]


def find_cupy() -> ModuleType | None:
    """CuPy, or None if it is not installed."""
    try:
        import cupy
    except ImportError:
        return None
    return cupy  # type: ignore[no-any-return]


def need_cupy() -> ModuleType:
    """CuPy. Raises PackageError, which names the package to install, if it is missing."""
    cupy = find_cupy()
    if cupy is None:
        raise PackageError(INSTALL)
    return cupy


def list_gpus() -> list[GpuInfo]:
    """The GPUs of this machine, with their current free memory."""
    cupy = find_cupy()
    if cupy is None:
        return []
    runtime = cupy.cuda.runtime
    try:
        count = runtime.getDeviceCount()
    except runtime.CUDARuntimeError:  # no driver, or no GPU
        return []
    return [_describe(cupy, index, count) for index in range(count)]


def _describe(cupy: ModuleType, index: int, count: int) -> GpuInfo:
    runtime = cupy.cuda.runtime
    with cupy.cuda.Device(index):
        free, total = runtime.memGetInfo()
        properties = runtime.getDeviceProperties(index)
        peers = {other: bool(runtime.deviceCanAccessPeer(index, other)) for other in range(count) if other != index}
    capability = f"{properties['major']}.{properties['minor']}"
    return GpuInfo(index, properties["name"].decode(), capability, total, free, peers)
