"""The contents of model folders for MLServer."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

from splitc.runtime.serving.serving_file import read_serving
from tests.helpers.command import splitc


def test_package_becomes_a_model(package: Path, tmp_path: Path) -> None:
    splitc("export", "mlserver", package, "-o", tmp_path / "models", "--threads", 1, "--in-flight", 3)
    folder = tmp_path / "models" / package.name
    assert json.loads((tmp_path / "models" / "settings.json").read_text()) == {"parallel_workers": 0}
    settings = json.loads((folder / "model-settings.json").read_text())
    assert settings["implementation"] == "splitc.runtime.serving.mlserver_model.SplitcModel"
    assert settings["outputs"] == [{"name": "logits", "datatype": "FP32", "shape": [-1, -1, 96]}]
    serving = read_serving(folder / settings["parameters"]["uri"])
    assert (serving.sequences, serving.threads, serving.in_flight) == (True, 1, 3)
    linked = folder / serving.package / "manifest.json"
    assert linked.stat().st_ino == (package / "manifest.json").stat().st_ino


def test_settings_that_are_there_stay(package: Path, tmp_path: Path) -> None:
    (tmp_path / "settings.json").write_text('{"debug": true}')
    splitc("export", "mlserver", package, "-o", tmp_path, "--name", "other", "--no-sequences")
    assert (tmp_path / "settings.json").read_text() == '{"debug": true}'
    assert len(json.loads((tmp_path / "other" / "model-settings.json").read_text())["inputs"]) == 7


def test_options_of_triton_are_refused(package: Path, tmp_path: Path) -> None:
    found = splitc("export", "mlserver", package, "-o", tmp_path / "models", "--batch", 4, code=2)
    assert "--batch has no effect with 'mlserver'" in found.stderr
    assert not (tmp_path / "models").exists()


def test_names_are_those_of_folders(package: Path, tmp_path: Path) -> None:
    for name in ("a/b", "..", ".hidden"):
        found = splitc("export", "mlserver", package, "-o", tmp_path, "--name", name, code=2)
        assert f"'{name}' can't be a model's name" in found.stderr
    found = splitc("export", "mlserver", package, "-o", tmp_path, "--name", "a\nb", code=2)
    assert r"'a\nb' can't be a model's name" in found.stderr


def test_package_that_is_incomplete_is_not_exported(package: Path, tmp_path: Path) -> None:
    copy = shutil.copytree(package, tmp_path / "copy")
    with next(copy.glob("rank0/*.weights")).open("r+b") as file:
        file.truncate(100)
    found = splitc("export", "mlserver", copy, "-o", tmp_path / "models", code=1)
    assert "has 100 bytes, its manifest says" in found.stderr
    assert not (tmp_path / "models").exists()
