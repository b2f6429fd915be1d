"""Builds a package's engines from its ONNX files: when it is compiled, or later on the machine where it will run.

Each kind of engine has a module with a `BUILDER`, which fulfils `Builder`. This needs TensorRT, but not ONNX Runtime.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import Protocol

import msgspec

from splitc.compiler.packaging.build_messages import Job, Refusal
from splitc.compiler.packaging.staging import full_disk_explained, written_aside
from splitc.runtime.engines.kinds import TENSORRT, TENSORRT_RTX, find_kind
from splitc.runtime.errors import MisuseError, SplitcError
from splitc.runtime.files.written import link_file
from splitc.runtime.hardware.devices import device_named
from splitc.runtime.package.files import describe_files
from splitc.runtime.package.manifest import Build, BuildOptions, Built, Manifest, Rank
from splitc.runtime.package.manifest_file import read_manifest, write_manifest
from splitc.runtime.package.verification import STAMP, verify_files


class BuildError(SplitcError):
    """An engine can't be built, or its builder does not support a node of the model."""

    page = "engines"


class Builder(Protocol):
    """Builds engines of one or several kinds, named by `engine`."""

    def check_here(self, engine: str) -> None:
        """Raise MisuseError if this machine can't build such engines."""

    def engine_path(self, folder: Path, stage: str, group: Sequence[int]) -> Path:
        """The engine's file for a stage's ONNX file. `group` are the ranks of collectives inside the engine, if any."""

    def build(
        self,
        engine: str,
        jobs: Sequence[Job],
        options: BuildOptions,
        timing_cache: Path,
        at_once: int | None = None,
    ) -> Built:
        """Build engines, `at_once` of them side by side if memory allows; None for as many as there are cores.

        Builders that measure kernels keep the timings in the file `timing_cache`.

        Raises MisuseError if the engine's library is missing, BuildError if an engine can't be built.
        """

    def find_refused(self, engine: str, jobs: Sequence[Job]) -> list[tuple[Job, Refusal]]:
        """The nodes in the jobs' ONNX files that are not supported. Builds nothing."""


def find_builder(engine: str) -> Builder:
    """The builder of a kind of engines."""
    module = find_kind(engine).builder
    assert module is not None, f"{engine} engines are not built"
    builder: Builder = import_module(module).BUILDER
    return builder


@dataclass(frozen=True)
class BuildSettings:
    """How and when to build.

    - `later`: leave it to `splitc build`.
    - `keep_sources`: keep the ONNX files in the package.
    - `timing_cache`: a file of TensorRT's timings, which is read and written; None for one beside the package.
    """

    options: BuildOptions = field(default_factory=BuildOptions)
    later: bool = False
    keep_sources: bool = False
    timing_cache: Path | None = None


# Each field's option, and the engines that it is for.
_BUILT = (TENSORRT, TENSORRT_RTX)
OPTIONS = {
    "later": ("--build later", _BUILT),
    "keep_sources": ("--keep-onnx", _BUILT),
    "timing_cache": ("--timing-cache", (TENSORRT,)),  # TensorRT-RTX measures no kernels when it builds
    "optimization_level": ("--builder-optimization-level", _BUILT),
    "workspace": ("--workspace", _BUILT),
    "version_compatible": ("--version-compatible", _BUILT),
    "hardware_compatible": ("--hardware-compatible", _BUILT),
    "weight_streaming": ("--weight-streaming", _BUILT),
    "strip_weights": ("--strip-weights", _BUILT),
    "tactic_sources": ("--tactic-sources", (TENSORRT,)),
}


def check_settings(engine: str, settings: BuildSettings) -> None:
    """Raise MisuseError for a setting that these engines do not have, or that another setting overrides."""
    for name, (flag, engines) in OPTIONS.items():
        value = getattr(settings if hasattr(settings, name) else settings.options, name)
        if value is not None and value is not False and engine not in engines:
            raise MisuseError(f"{flag} is for --engine {' and '.join(engines)}, and this package's is {engine}")
    if settings.later and settings.timing_cache is not None:
        raise MisuseError("--timing-cache has no effect with --build later: give it to 'splitc build'")


def build_package(package: Path, timing_cache: Path | None = None, jobs: int | None = None) -> Manifest:
    """Build, or build again, the engines of a package that holds their ONNX files. The package is replaced.

    `jobs` engines are built at once if memory allows; None for as many as there are cores.

    Raises MisuseError if the package does not hold the ONNX files, or if TensorRT or the GPU is missing, and
    BuildError, which names what TensorRT can't build. The package is unchanged then.
    """
    manifest, settings = read_sources(package, timing_cache)
    with full_disk_explained(package, 0), written_aside(package, replace=True) as folder:
        copy_package(package, folder)
        return finish_package(folder, manifest, settings, package, jobs)


def read_sources(package: Path, timing_cache: Path | None) -> tuple[Manifest, BuildSettings]:
    """The manifest of a package that holds its engines' ONNX files, and the settings to build them here.

    Raises as `build_package` does.
    """
    manifest = read_manifest(package)
    if not find_kind(manifest.engine).is_built or manifest.build is None:
        raise MisuseError(f"{package} has {manifest.engine} engines, which are ONNX files: there is nothing to build")
    if any(engine.source is None for engine in manifest.engines):
        raise MisuseError(
            f"{package} does not hold the ONNX files that its engines are built from: compile the model again, with "
            "--keep-onnx or --build later"
        )
    settings = BuildSettings(manifest.build.options, keep_sources=True, timing_cache=timing_cache)
    check_settings(manifest.engine, settings)
    find_builder(manifest.engine).check_here(manifest.engine)
    replaced = tuple(engine.path for engine in manifest.engines)
    verify_files(package, [file for file in manifest.files if not file.path.endswith(replaced)])
    return manifest, settings


def timing_cache_beside(package: Path) -> Path:
    """The default file of TensorRT's timings."""
    return package.absolute().with_name(f"{package.name}.timing-cache")


def finish_package(
    folder: Path, manifest: Manifest, settings: BuildSettings, target: Path, at_once: int | None = None
) -> Manifest:
    """Build the engines of the package in `folder`, which will move to `target`. Writes and returns its manifest."""
    jobs, builder = list(_jobs(folder, manifest)), find_builder(manifest.engine)
    for job in jobs:
        Path(job.engine or "").unlink(missing_ok=True)  # may be a hard link to the engine that this one replaces
    timing_cache = settings.timing_cache or timing_cache_beside(target)
    built = builder.build(manifest.engine, jobs, settings.options, timing_cache, at_once)
    keep = settings.keep_sources or settings.options.strip_weights
    if not keep:
        manifest = _without_sources(folder, manifest)
    engines = {engine.path for engine in manifest.engines}
    others = [file for file in manifest.files if file.path not in engines and (folder / file.path).exists()]
    files = sorted([*others, *describe_files(folder, [folder / path for path in engines])], key=lambda file: file.path)
    return write_manifest(folder, msgspec.structs.replace(manifest, build=Build(settings.options, built), files=files))


def _jobs(folder: Path, manifest: Manifest) -> Iterator[Job]:
    for number, rank in enumerate(manifest.ranks):
        gpu = device_named(rank.device).index
        for engine in rank.engines:
            assert engine.source is not None, "read_sources has looked, and compile_model has just written them"
            where = f"{engine.source} (rank {number}, {rank.device}, {rank.blocks[0]} to {rank.blocks[-1]})"
            yield Job(str(folder / engine.source), str(folder / engine.path), engine.sizes, where, gpu)


def _without_sources(folder: Path, manifest: Manifest) -> Manifest:
    """Remove the ONNX files and their weights. Returns the manifest without them."""
    kept = {folder / engine.path for engine in manifest.engines}
    for path in [path for path in folder.rglob("*") if path.is_file() and path not in kept]:
        path.unlink()

    def bare(rank: Rank) -> Rank:
        engines = [msgspec.structs.replace(engine, source=None) for engine in rank.engines]
        return msgspec.structs.replace(rank, engines=engines)

    return msgspec.structs.replace(manifest, ranks=list(map(bare, manifest.ranks)))


def copy_package(package: Path, folder: Path) -> None:
    """Copy a package into an existing folder, by hard links if the disk supports them."""
    stamps = shutil.ignore_patterns(STAMP)
    shutil.copytree(package, folder, ignore=stamps, copy_function=link_file, dirs_exist_ok=True)
