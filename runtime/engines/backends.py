"""The backend that loads a package's engines on a device."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from pathlib import Path

from splitc.runtime.devices import Device
from splitc.runtime.engines import Backend
from splitc.runtime.engines.kinds import MODULES, ONNXRUNTIME, PACKAGES
from splitc.runtime.errors import PackageError
from splitc.runtime.gpus import list_gpus
from splitc.runtime.manifest import Build, BuildOptions, Manifest


def make_backend(
    engine: str, device: Device, threads: int, build: Build | None = None, cuda_graphs: bool = True
) -> Backend:
    """What loads engines of the kind on the device: a CPU device with so many threads, or a GPU.

    Raises PackageError where the GPU, or a library, is missing.
    """
    # Imported here: a machine needs only what its package needs.
    if engine in MODULES:
        from splitc.runtime.engines.tensorrt_gpu import TensorrtBackend

        options = build.options if build is not None else BuildOptions()
        return TensorrtBackend(engine, device.index, options, cuda_graphs)
    if device.kind == "cuda":
        from splitc.runtime.engines.onnxruntime_gpu import OnnxRuntimeGpuBackend

        return OnnxRuntimeGpuBackend(device.index, cuda_graphs)
    from splitc.runtime.engines.onnxruntime_cpu import OnnxRuntimeBackend

    return OnnxRuntimeBackend(threads)


def check_built_here(package: Path, manifest: Manifest, devices: Sequence[Device]) -> None:
    """Raise PackageError, naming both, unless the package's engines were built for this TensorRT and these GPUs."""
    if manifest.engine == ONNXRUNTIME or manifest.build is None:
        return
    again = f"splitc build {package}"
    if any(engine.source is None for rank in manifest.ranks for engine in rank.engines):
        again = f"splitc compile {manifest.source.name} -o {package} --force --engine {manifest.engine} ..."
    built, options = manifest.build.built, manifest.build.options
    if built is None:
        raise PackageError(f"the engines of {package} are not built yet: run '{again}'")
    version = _installed_version(manifest.engine)
    if version is None:
        raise PackageError(
            f"{package} has engines of {manifest.engine} {built.version}, which is not installed: "
            f"pip install {PACKAGES[manifest.engine]}=={built.version}"
        )
    if version != built.version and not options.version_compatible:
        raise PackageError(
            f"{package} was built with {manifest.engine} {built.version}, and this machine has {version}: "
            f"build it again with '{again}'"
        )
    for gpu in (gpu for gpu in list_gpus() if Device("cuda", gpu.index) in devices):
        same = gpu.compute_capability == built.compute_capability and gpu.name == built.gpu
        if built.gpu is not None and not same and not options.hardware_compatible:
            raise PackageError(
                f"{package} was built for {built.gpu} (compute capability {built.compute_capability}), and cuda"
                f"{gpu.index} is {gpu.name} ({gpu.compute_capability}): build it again with '{again}'"
            )


def _installed_version(engine: str) -> str | None:
    try:
        return str(importlib.import_module(MODULES[engine]).__version__)
    except ImportError:
        return None
