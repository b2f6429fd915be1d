"""Engines of several modules, built later by TensorRT-RTX, which needs no GPU for that."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from models.writer import save
from splitc.runtime.package.manifest_file import read_manifest
from splitc.runtime.package.pipeline_file import find_module
from tests.helpers.command import splitc
from tests.helpers.folders import text_encoder, write_json

pytest.importorskip("tensorrt_rtx", reason="TensorRT-RTX builds engines without a GPU")


def test_modules_are_built_later(tmp_path: Path) -> None:
    folder, package = tmp_path / "models", tmp_path / "package"
    for name in ("text_encoder", "text_encoder_2"):
        save(text_encoder(1).model(), folder / name / "model.onnx")
        write_json(folder / name / "config.json", {})
    rtx = ("--engine", "tensorrt-rtx", "--memory", "1GiB", "--build", "later")
    splitc("compile", folder, "-d", "2xcuda", "-o", package, *rtx)
    shown = json.loads(splitc("build", package, "--json").stdout)
    assert list(shown["modules"]) == ["text_encoder", "text_encoder_2"]
    for name in shown["modules"]:
        manifest = read_manifest(find_module(package, name))
        assert manifest.build is not None and manifest.build.built is not None
        assert (package / manifest.ranks[0].engines[0].path.replace("rank0", f"{name}/rank0")).is_file()
        assert (package / name / "config.json").is_file()
    splitc("compile", folder, "-d", "cpu0", "-o", package, "--force")
    assert "there is nothing to build" in splitc("build", package, code=2).stderr
