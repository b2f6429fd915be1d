"""Writes the package of a folder: the package of each module, the files that travel, and pipeline.json last.

Its engines may be built later, on the machine where they will run.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType

import msgspec

from splitc.compiler.packaging.building import (
    BuildSettings,
    copy_package,
    finish_package,
    read_sources,
    timing_cache_beside,
)
from splitc.compiler.packaging.package import compile_model, least_bytes
from splitc.compiler.packaging.staging import check_target, full_disk_explained, written_aside
from splitc.compiler.packaging.writer import PackageWriter
from splitc.compiler.pipelines.plan import PipelinePlan, module_named
from splitc.compiler.pipelines.requests import divide_by_input
from splitc.runtime.engines.kinds import TENSORRT, find_kind
from splitc.runtime.errors import MisuseError, SplitcError, collected, raise_all
from splitc.runtime.files.written import try_link
from splitc.runtime.package.manifest import EngineFile, File, Fill, Manifest
from splitc.runtime.package.manifest_file import FILE_NAME, read_manifest, read_seal, write_manifest
from splitc.runtime.package.pipeline_file import FILE_NAME as PIPELINE
from splitc.runtime.package.pipeline_file import Module, PipelineFile, write_pipeline
from splitc.runtime.threads.garbage import rare_garbage


@rare_garbage()
def compile_pipeline(
    plan: PipelinePlan,
    package: str | Path,
    *,
    weights: str = "copy",
    threads: int | None = None,
    force: bool = False,
    verify: bool = True,
    jobs: int | None = None,
    build: BuildSettings = BuildSettings(),
    fills: Mapping[str, Fill] = MappingProxyType({}),
    warn: Callable[[str], None] = lambda _: None,
    say: Callable[[str], None] = lambda _: None,
) -> dict[str, Manifest]:
    """Write the package of a folder's plan: all modules, or nothing. Returns the modules' manifests by name.

    Errors of several modules are raised together. Arguments and errors are those of `compile_model`; `fills` may name
    modules, as in `unet.sample`. Files of weights that are equal in two modules are one file on the disk.
    """
    target = Path(package)
    check_target(target, force)
    divided = divide_by_input(plan.folder.modules, fills, "--fill")
    needed = sum(least_bytes(module.plan) for module in plan.modules) if weights == "copy" else 0
    manifests: dict[str, Manifest] = {}
    with full_disk_explained(target, needed), written_aside(target, force) as folder:
        errors: list[SplitcError] = []
        for module in plan.modules:
            with collected(errors), module_named(module.name):
                manifests[module.name] = compile_model(
                    module.plan,
                    folder / module.name,
                    weights=weights,
                    threads=threads,
                    verify=verify,
                    jobs=jobs,
                    build=_build_settings(build, module.plan.engine, target),
                    fills=divided[module.name],
                    warn=lambda text, name=module.name: warn(f"{name}: {text}"),  # type: ignore[misc]
                    say=lambda text, name=module.name: say(f"{name}: {text}"),  # type: ignore[misc]
                )
        raise_all(errors)
        for name, keys in plan.common.keys.items():
            manifests[name] = write_manifest(folder / name, _with_keys(manifests[name], keys))
        _share_files(folder, manifests)
        files = _copy_files(plan, folder)
        modules = [Module(m.name, read_seal(folder / m.name), plan.folder.source(m.module)) for m in plan.modules]
        write_pipeline(folder, PipelineFile(modules, files, swap=plan.swap))
    return manifests


def _build_settings(build: BuildSettings, engine: str, target: Path) -> BuildSettings:
    """The settings with one file of TensorRT's timings for all modules, beside the package."""
    if engine != TENSORRT or build.later or build.timing_cache is not None:
        return build
    return replace(build, timing_cache=timing_cache_beside(target))


def _with_keys(manifest: Manifest, keys: Sequence[Mapping[str, str]]) -> Manifest:
    """The manifest with the keys of weights that other modules have too, by rank and name."""
    ranks = [
        msgspec.structs.replace(rank, engines=[_engine_with_keys(engine, own) for engine in rank.engines])
        for rank, own in zip(manifest.ranks, keys, strict=True)
    ]
    return msgspec.structs.replace(manifest, ranks=ranks)


def _engine_with_keys(engine: EngineFile, keys: Mapping[str, str]) -> EngineFile:
    if engine.weights is None:
        return engine
    weights = [msgspec.structs.replace(weight, key=keys.get(weight.name, "")) for weight in engine.weights]
    return msgspec.structs.replace(engine, weights=weights)


def _share_files(folder: Path, manifests: Mapping[str, Manifest]) -> None:
    """Replace files of equal content in two modules by hard links to one file, if the disk supports them."""
    first_of: dict[tuple[int, str], Path] = {}
    for name, manifest in manifests.items():
        for file in manifest.files:
            if file.hash is None:
                continue
            path = folder / name / file.path
            first = first_of.setdefault((file.bytes, file.hash), path)
            if first == path or first.is_relative_to(folder / name):
                continue
            aside = path.with_name(f"{path.name}.link")
            if not try_link(first, aside):
                return
            aside.replace(path)


def _copy_files(plan: PipelinePlan, folder: Path) -> list[File]:
    """Copy the files that travel to the same paths. Returns their entries."""
    writer = PackageWriter(folder)
    for path in plan.folder.files:
        source, target = plan.folder.path / path, folder / path
        if target.exists() or path.as_posix() == PIPELINE or FILE_NAME in path.parts[1:]:
            raise MisuseError(
                f"{source} can't travel: the package has a file of its own at {path}. Give it another name"
            )
        target.parent.mkdir(parents=True, exist_ok=True)
        writer.copy(source, target)
    return writer.files


def build_pipeline(
    package: Path, pipeline: PipelineFile, timing_cache: Path | None = None, jobs: int | None = None
) -> dict[str, Manifest]:
    """Build the engines of all modules that have built ones. Returns their manifests by name. The package is replaced.

    Arguments and errors are those of `build_package`.
    """
    names = [
        module.name for module in pipeline.modules if find_kind(read_manifest(package / module.name).engine).is_built
    ]
    if not names:
        raise MisuseError(f"all modules of {package} have engines that are ONNX files: there is nothing to build")
    manifests = {}
    with full_disk_explained(package, 0), written_aside(package, replace=True) as folder:
        copy_package(package, folder)
        for name in names:
            with module_named(name):
                manifest, settings = read_sources(package / name, timing_cache)
                manifests[name] = finish_package(folder / name, manifest, settings, package, jobs)
        modules = [msgspec.structs.replace(module, seal=read_seal(folder / module.name)) for module in pipeline.modules]
        (folder / PIPELINE).unlink()  # it may be a hard link to the old package's file
        write_pipeline(folder, msgspec.structs.replace(pipeline, modules=modules))
    return manifests
