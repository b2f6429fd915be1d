"""The NVIDIA GPUs of this machine, as CuPy sees them; none if CuPy or the driver is missing."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType

from splitc.runtime.errors import PackageError

# The message if CuPy is missing.
INSTALL = "GPUs need CuPy: pip install 'splitc[cuda]' for a driver of CUDA 13, or cupy-cuda12x for an older one"


@dataclass(frozen=True)
class GpuInfo:
    """One GPU: its index in CUDA's order, its memory in bytes, and whether it has peer access to each other one."""

    index: int
    name: str
    compute_capability: str
    total_bytes: int
    free_bytes: int
    peers: Mapping[int, bool]


@dataclass(frozen=True)
class GpuIdentity:
    """One GPU by its PCI bus number, which is the same in every process; its memory in bytes."""

    bus: str
    name: str
    total_bytes: int


def find_cupy() -> ModuleType | None:
    """CuPy, or None if it is not installed."""
    if "cupy" not in sys.modules and find_spec("cupy") is not None:
        _find_cache()
    try:
        import cupy
    except ImportError:
        return None
    return cupy  # type: ignore[no-any-return]


def _find_cache() -> None:
    """Have CuPy cache compiled kernels in memory if the user's home can't be written, where it would fail."""
    try:
        folder = Path(os.environ.get("CUPY_CACHE_DIR", "~/.cupy/kernel_cache")).expanduser()
        folder.mkdir(parents=True, exist_ok=True)
        writable = os.access(folder, os.W_OK)
    except (OSError, RuntimeError):  # there is no home
        writable = False
    if not writable:
        os.environ.update(CUPY_CACHE_DIR=os.sep, CUPY_CACHE_IN_MEMORY="1")  # it wants some folder that is there


def need_cupy() -> ModuleType:
    """CuPy. Raises PackageError, which names the package to install, if it is missing."""
    cupy = find_cupy()
    if cupy is None:
        missing = PackageError(INSTALL)
        missing.page = "gpus"
        raise missing
    return cupy


def count_gpus() -> int:
    """The number of GPUs that this process sees. Takes no memory of them."""
    if (cupy := find_cupy()) is None:
        return 0
    try:
        return int(cupy.cuda.runtime.getDeviceCount())
    except cupy.cuda.runtime.CUDARuntimeError:  # no driver, or no GPU
        return 0


def identify_gpu(ordinal: int) -> GpuIdentity:
    """The GPU of this number in this process. Takes no memory of it."""
    runtime = need_cupy().cuda.runtime
    properties = runtime.getDeviceProperties(ordinal)
    bus = runtime.deviceGetPCIBusId(ordinal)
    return GpuIdentity(bus, properties["name"].decode(), int(properties["totalGlobalMem"]))


def list_gpus() -> list[GpuInfo]:
    """The GPUs of this machine, with their current free memory."""
    count = count_gpus()
    return [_describe(need_cupy(), index, count) for index in range(count)]


def _describe(cupy: ModuleType, index: int, count: int) -> GpuInfo:
    runtime = cupy.cuda.runtime
    with cupy.cuda.Device(index):
        free, total = runtime.memGetInfo()
        properties = runtime.getDeviceProperties(index)
        peers = {other: bool(runtime.deviceCanAccessPeer(index, other)) for other in range(count) if other != index}
    capability = f"{properties['major']}.{properties['minor']}"
    return GpuInfo(index, properties["name"].decode(), capability, total, free, peers)
