"""Builds the engines of a package of several models, on the machine where it will run."""

from __future__ import annotations

from pathlib import Path

import msgspec

from splitc.compiler.packaging.building import copy_package, finish_package, read_sources
from splitc.compiler.packaging.staging import full_disk_explained, written_aside
from splitc.compiler.pipelines.plan import module_named
from splitc.runtime.engines.kinds import find_kind
from splitc.runtime.errors import MisuseError
from splitc.runtime.package.manifest import Manifest
from splitc.runtime.package.manifest_file import read_manifest, read_seal
from splitc.runtime.package.pipeline_file import FILE_NAME, PipelineFile, write_pipeline


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
        (folder / FILE_NAME).unlink()  # it may be a hard link to the old package's file
        write_pipeline(folder, msgspec.structs.replace(pipeline, modules=modules))
    return manifests
