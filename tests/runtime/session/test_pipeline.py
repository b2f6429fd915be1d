"""Packages of several models."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from splitc.runtime import MisuseError, PackageError, Pipeline, Session
from splitc.runtime.cli.app import app
from splitc.runtime.package.manifest import File
from splitc.runtime.package.pipeline_file import FILE_NAME, Module, PipelineFile, read_pipeline, write_pipeline
from tests.conftest import assert_close, decoder_feeds, run_whole
from tests.helpers.packages import compile_mode, write_modules

MODES = {"first": "layer", "second": "tensor"}


@pytest.fixture
def pipeline(decoder: Path, tmp_path: Path) -> Path:
    """The same model in two modes."""
    return write_modules(tmp_path / "pipeline", {name: compile_mode(decoder, mode) for name, mode in MODES.items()})


def test_modules_give_what_their_models_give(decoder: Path, pipeline: Path) -> None:
    feeds = decoder_feeds()
    expected = run_whole(decoder, feeds)
    with Pipeline(pipeline, threads=1, own={"second": {"verify": "always"}}) as opened:
        assert list(opened) == list(MODES)
        for session in opened.values():
            assert_close(session.run(feeds), expected)
    with Session(pipeline, module="second") as alone:
        assert_close(alone.run(feeds), expected)


@pytest.mark.parametrize(
    ("work", "message"),
    [
        (lambda folder, _: Session(folder), r"has several models: say which, with --module \(first, second\)"),
        (lambda folder, _: Session(folder, module="third"), "no module 'third': there are first, second"),
        (lambda folder, _: Pipeline(folder, own={"third": {}}), "no module 'third': there are first, second"),
        (lambda _, alone: Session(alone, module="first"), "package of one model, and has no module 'first'"),
        (lambda _, alone: Pipeline(alone), "has no modules: open it as a Session"),
    ],
)
def test_modules_that_are_not_there(
    decoder: Path, pipeline: Path, work: Callable[[Path, Path], Any], message: str
) -> None:
    with pytest.raises(MisuseError, match=message):
        work(pipeline, compile_mode(decoder, "layer"))


def test_no_package_is_no_pipeline(tmp_path: Path) -> None:
    with pytest.raises(PackageError, match="missing does not exist; make one"):
        Pipeline(tmp_path / "missing")
    with pytest.raises(PackageError, match="/dev/null is a file, and packages are folders"):
        Pipeline("/dev/null")


def test_pipeline_of_which_not_all_was_copied(pipeline: Path) -> None:
    (pipeline / "second" / "manifest.json").unlink()
    with pytest.raises(PackageError, match=r"second/manifest\.json is missing: the package is incomplete, copy all"):
        Pipeline(pipeline)
    (pipeline / FILE_NAME).unlink()
    said = r"has no manifest\.json, so it is no package, and these in it are: first\. .* its pipeline\.json is missing"
    with pytest.raises(PackageError, match=said):
        Session(pipeline, module="first")


def test_module_of_another_pipeline_is_refused(decoder: Path, pipeline: Path) -> None:
    shutil.rmtree(pipeline / "second")
    shutil.copytree(compile_mode(decoder, "row"), pipeline / "second")
    with pytest.raises(PackageError, match="second is not the module"), Pipeline(pipeline):
        pass
    (pipeline / FILE_NAME).write_text((pipeline / FILE_NAME).read_text().replace("first", "thirst"))
    with pytest.raises(PackageError, match="was changed since it was compiled"):
        Session(pipeline, module="first")


def test_module_whose_manifest_never_ends(pipeline: Path) -> None:
    (pipeline / "second" / "manifest.json").unlink()
    os.mkfifo(pipeline / "second" / "manifest.json")
    with pytest.raises(PackageError, match=r"manifest\.json is no regular file"):
        Session(pipeline, module="second")


@pytest.mark.parametrize(
    ("name", "source", "file"),
    [("/nowhere", "m.onnx", "a"), ("m", "/nowhere/m.onnx", "a"), ("m", "../m.onnx", "a"), ("m", "m.onnx", "../a")],
)
def test_paths_stay_inside(name: str, source: str, file: str, tmp_path: Path) -> None:
    write_pipeline(tmp_path, PipelineFile([Module(name, "0" * 64, source)], [File(file, 0)]))
    with pytest.raises(PackageError, match="which lies outside the package"):
        read_pipeline(tmp_path)


def test_modules_are_not_opened_together_under_mpi(pipeline: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("splitc.runtime.session.pipeline.begin", object)
    with pytest.raises(MisuseError, match="serve one module at a time"):
        Pipeline(pipeline)
    Pipeline(pipeline, ranks="threads").close()


def test_inspect_sums_modules_by_device(pipeline: Path) -> None:
    shown = CliRunner().invoke(app, ["inspect", str(pipeline), "--json"])
    assert shown.exit_code == 0, shown.output
    modules = json.loads(shown.output)["modules"]
    assert {name: each["split_mode"] for name, each in modules.items()} == MODES
    table = CliRunner().invoke(app, ["inspect", str(pipeline)]).output
    assert "second, tensor" in table and "--module" in table
