"""Whether a package's engines may run here, and were built for this machine."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from pathlib import Path

from splitc.runtime.engines.kind import release
from splitc.runtime.engines.kinds import ONNXRUNTIME, find_kind
from splitc.runtime.errors import MisuseError, PackageError
from splitc.runtime.hardware.devices import Device
from splitc.runtime.hardware.gpus import list_gpus
from splitc.runtime.package.manifest import Manifest


def check_host_code(package: Path, manifest: Manifest, allowed: bool) -> None:
    """Raise MisuseError if the package's engines contain code that runs on the host, unless the caller allows it.

    That code can do whatever the program can. TensorRT only loads it from engines that were built for it.
    """
    if manifest.build is not None and manifest.build.options.version_compatible and not allowed:
        raise MisuseError(
            f"{package} was built with --version-compatible: its engines contain code that runs in this program. If "
            "you trust the source of the package, allow that with --host-code, or host_code=True"
        )


def check_built_here(package: Path, manifest: Manifest, devices: Sequence[Device]) -> None:
    """Raise PackageError unless the package's engines were built for the installed library and these GPUs."""
    kind = find_kind(manifest.engine)
    if not kind.is_built or manifest.build is None:
        return
    again = f"splitc build {package}"
    if any(engine.source is None for engine in manifest.engines):
        again = f"splitc compile {manifest.source.name} -o {package} --force --engine {manifest.engine} ..."
    built, options = manifest.build.built, manifest.build.options
    if built is None:
        raise PackageError(f"the engines of {package} are not built yet: run '{again}'")
    version = kind.version
    if version is None:
        raise PackageError(
            f"{package} has engines of {manifest.engine} {built.version}, which is not installed: "
            f"pip install {kind.package}=={built.version}"
        )
    if version != built.version and not options.version_compatible:
        raise PackageError(
            f"{package} was built with {manifest.engine} {built.version}, and this machine has {version}: "
            f"build it again with '{again}'"
        )
    ours = {device.local for device in devices}
    for gpu in (gpu for gpu in list_gpus() if Device("cuda", gpu.index) in ours):
        same = gpu.compute_capability == built.compute_capability and gpu.name == built.gpu
        if built.gpu is not None and not same and not options.hardware_compatible:
            raise PackageError(
                f"{package} was built for {built.gpu} (compute capability {built.compute_capability}), and cuda"
                f"{gpu.index} is {gpu.name} ({gpu.compute_capability}): build it again with '{again}'"
            )


@contextlib.contextmanager
def newer_named(manifest: Manifest) -> Iterator[None]:
    """Add both versions to the PackageError of an ONNX file, if ONNX Runtime here is the older one."""
    try:
        yield
    except PackageError as error:
        made, installed = manifest.onnxruntime, find_kind(ONNXRUNTIME).version or ""
        if release(installed) >= release(made):
            raise
        raise PackageError(
            f"{error}. The package was compiled with ONNX Runtime {made}, and {installed} is installed, which is "
            f"older: install at least {made}, or compile {manifest.source.name} again with {installed}"
        ) from error
