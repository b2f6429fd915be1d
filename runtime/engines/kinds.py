"""The kinds of engines, which one is the default, and the backends that load them."""

from __future__ import annotations

from collections.abc import Sequence
from pkgutil import resolve_name

from splitc.runtime.engines import Backend
from splitc.runtime.engines.kind import BackendOptions, EngineKind
from splitc.runtime.errors import MisuseError
from splitc.runtime.hardware.devices import Device
from splitc.runtime.package.manifest import Build, BuildOptions

ONNXRUNTIME, TENSORRT, TENSORRT_RTX = "onnxruntime", "tensorrt", "tensorrt-rtx"
_TENSORRT_BUILDER = "splitc.compiler.packaging.tensorrt_builder"
_TENSORRT_BACKENDS = {"cuda": "splitc.runtime.engines.tensorrt_gpu:TensorrtBackend"}
_TABLE = (
    EngineKind(
        name=ONNXRUNTIME,
        title="ONNX Runtime",
        on_gpus="ONNX Runtime's CUDA provider",
        module="onnxruntime",
        package="onnxruntime-gpu",
        backends={
            "cpu": "splitc.runtime.engines.onnxruntime_cpu:OnnxRuntimeBackend",
            "cuda": "splitc.runtime.engines.onnxruntime_gpu:OnnxRuntimeGpuBackend",
        },
        priority=0,
        collectives_since=(),
        swaps_weights=frozenset({"cpu", "cuda"}),
        shares_weights=frozenset({"cuda"}),  # on CPUs each session packs them anew, for its matmuls
        uses_operators=True,
    ),
    EngineKind(
        name=TENSORRT,
        title="TensorRT",
        on_gpus=TENSORRT,
        module="tensorrt",
        package="tensorrt",
        backends=_TENSORRT_BACKENDS,
        builder=_TENSORRT_BUILDER,
        priority=1,
        collectives_since=(10, 16),  # DistCollective
    ),
    EngineKind(
        name=TENSORRT_RTX,
        title="TensorRT-RTX",
        on_gpus=TENSORRT_RTX,
        module="tensorrt_rtx",
        package="tensorrt-rtx-cu13",
        backends=_TENSORRT_BACKENDS,
        builder=_TENSORRT_BUILDER,
        collectives_since=(),  # all releases for Python
    ),
)
KINDS = {kind.name: kind for kind in _TABLE}
# The pip packages of the kinds that are built.
PACKAGES = {kind.name: kind.package for kind in _TABLE if kind.is_built}


def make_backend(
    engine: str,
    device: Device,
    threads: int,
    build: Build | None = None,
    cuda_graphs: bool = True,
    trusts_data: bool = False,
    replays: bool = True,
) -> Backend:
    """The backend for this kind of engine on the device. `threads` is the number of threads of a CPU device.

    Raises PackageError if the GPU or a library is missing.
    """
    kind = find_kind(engine)
    building = BuildOptions() if build is None else build.options
    options = BackendOptions(kind, device, threads, building, cuda_graphs, trusts_data, replays)
    # Only now: a machine needs no libraries but those of the engines that it uses.
    backend: Backend = resolve_name(kind.backends[device.kind]).create(options)
    return backend


def find_kind(name: str) -> EngineKind:
    """The kind of this name. Raises MisuseError if there is none."""
    if name not in KINDS:
        raise MisuseError(f"unknown engine '{name}': there are {', '.join(KINDS)}")
    return KINDS[name]


def choose_engine(asked: str | None, devices: Sequence[Device]) -> str:
    """The kind that was asked for, or else the best installed one that runs on all devices: TensorRT on GPUs.

    Raises MisuseError for an unknown kind, and for one that does not run on the devices.
    """
    if asked is None:
        return next(
            kind.name
            for kind in _by_priority()
            if all(device.kind in kind.backends for device in devices) and kind.is_installed
        )
    kind = find_kind(asked)
    if others := [str(device) for device in devices if device.kind not in kind.backends]:
        raise MisuseError(
            f"{kind.title} runs on GPUs (cuda0, ...), and {others[0]} is none: compile with --engine onnxruntime for it"
        )
    return asked


def has_gpu_each(devices: Sequence[Device]) -> bool:
    """Whether there are several ranks, each with a GPU of its own."""
    return len(devices) > 1 and len(set(devices)) == len(devices) and all(device.kind == "cuda" for device in devices)


def _by_priority() -> list[EngineKind]:
    """The kinds that may be the default, the best first."""
    return sorted(
        (kind for kind in KINDS.values() if kind.priority is not None), key=lambda kind: -(kind.priority or 0)
    )


def describe_engine(engine: str) -> str:
    """What runs engines of this kind on GPUs, and why no better kind is used."""
    kind, best = find_kind(engine), _by_priority()[0]
    passed_over = kind.priority is not None and kind != best and not best.is_installed
    return kind.on_gpus + (f" ({best.title} is not installed)" if passed_over else "")


def has_collectives(engine: str, devices: Sequence[Device]) -> bool:
    """Whether engines that are built here may have collectives inside, on these devices.

    Operators use NCCL if each rank has its own GPU, and the host's memory otherwise, on any devices.
    """
    kind = find_kind(engine)
    return kind.has_collectives and (kind.uses_operators or has_gpu_each(devices))


def maps_weights(engine: str, devices: Sequence[Device]) -> bool:
    """Whether weights that kernels do not pack stay in mapped files: only pages that are read take memory."""
    return engine == ONNXRUNTIME and all(device.kind == "cpu" for device in devices)
