"""Packages of a model in each split mode, shared by tests."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from functools import cache
from pathlib import Path

from splitc.compiler import Request, compile_model, plan_model
from splitc.runtime.package.manifest_file import read_seal
from splitc.runtime.package.pipeline_file import Module, PipelineFile, write_pipeline

MODES = {
    "layer": ("2xcpu", Request(split_mode="layer")),
    "row": ("2xcpu", Request(split_mode="row", row_min=16)),
    "tensor": ("2xcpu", Request(split_mode="tensor")),
    "more ranks than heads": ("3xcpu", Request(split_mode="tensor")),
    "tensor in layers": ("4xcpu", Request(split_mode="tensor", pipeline_stages=2)),
    "batch": ("2xcpu", Request(split_mode="batch")),
    "tensor in groups": ("4xcpu", Request(split_mode="tensor", batch_groups=2)),
    "one device": ("cpu0", Request()),
}
# Modes with all kinds of ranks and steps: the last two combine tensor mode with stages and with groups.
KINDS = ("layer", "row", "more ranks than heads", "tensor in layers", "tensor in groups")


@cache
def compile_mode(model: Path, mode: str) -> Path:
    """The package of the model in one of the MODES, beside the model."""
    devices, request = MODES[mode]
    package = model.with_name(f"{model.stem}-{mode.replace(' ', '-')}-{devices}")
    compile_model(plan_model(model, [devices], request), package, verify=False)
    return package


def write_modules(folder: Path, packages: Mapping[str, Path]) -> Path:
    """A package with these packages as modules."""
    for name, package in packages.items():
        shutil.copytree(package, folder / name)
    modules = [Module(name, read_seal(folder / name), f"{name}/model.onnx") for name in packages]
    write_pipeline(folder, PipelineFile(modules, []))
    return folder
