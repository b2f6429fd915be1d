"""Packages that another program replaces while they are opened."""

from __future__ import annotations

import itertools
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import onnx
import pytest
from onnx import numpy_helper

from splitc.compiler import Request, compile_model, plan_model
from splitc.runtime import PackageError, Pipeline, Session
from splitc.runtime.package.manifest_file import FILE_NAME, same_package
from tests.helpers.packages import write_modules

LOADERS = {"engine": "ranks.loaded", "session": "session.pipeline"}
Before = Callable[[int, str, Callable[[], None]], None]
GONE = "was replaced or removed since this session began to load it: open it again"


def replace_with(other: Path, package: Path) -> None:
    """As `splitc compile --force` does."""
    package.rename(package.with_name("replaced"))
    shutil.copytree(other, package)


@pytest.fixture(scope="module")
def retrained(decoder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A package of the same model with other weights."""
    model = onnx.load(decoder)
    for tensor in model.graph.initializer:
        if len(tensor.dims) == 2:
            tensor.CopyFrom(numpy_helper.from_array(1.5 * numpy_helper.to_array(tensor), tensor.name))
    folder = tmp_path_factory.mktemp("retrained")
    onnx.save(model, folder / "decoder.onnx")
    compile_model(plan_model(folder / "decoder.onnx", ["3xcpu"], Request(split_mode="layer")), folder / "package")
    return folder / "package"


@pytest.fixture
def before(monkeypatch: pytest.MonkeyPatch) -> Before:
    """Call a function before this many have been loaded: engines, or sessions of a pipeline."""

    def patch(count: int, what: str, call: Callable[[], None]) -> None:
        loaded = itertools.count(1)

        def counting(*where: Any) -> Any:
            if next(loaded) == count:
                call()
            return same_package(*where)

        monkeypatch.setattr(f"splitc.runtime.{LOADERS[what]}.same_package", counting)

    return patch


@pytest.mark.parametrize("count", [1, 2, 3])
def test_ranks_are_of_one_package(package: Path, retrained: Path, tmp_path: Path, before: Before, count: int) -> None:
    """Files are loaded by name: some ranks had the old weights, and others the new ones."""
    copy = shutil.copytree(package, tmp_path / "package")
    before(count, "engine", lambda: replace_with(retrained, copy))
    with pytest.raises(PackageError, match=GONE):
        Session(copy, verify="never")


def test_what_fails_for_that_reason_says_so(package: Path, tmp_path: Path, before: Before) -> None:
    """The manifest is removed first: other ranks' threads load meanwhile, and may miss a file before it is gone."""
    copy = shutil.copytree(package, tmp_path / "package")

    def remove() -> None:
        (copy / FILE_NAME).unlink()
        shutil.rmtree(copy)

    before(2, "engine", remove)
    with pytest.raises(PackageError, match=GONE):
        Session(copy, verify="never")


def test_modules_are_of_one_pipeline(
    decoder: Path, package: Path, retrained: Path, tmp_path: Path, before: Before
) -> None:
    old = write_modules(tmp_path / "pipeline", {"first": package, "second": package})
    new = write_modules(tmp_path / "next", {"first": retrained, "second": retrained})
    before(2, "session", lambda: replace_with(new, old))
    with pytest.raises(PackageError, match=GONE):
        Pipeline(old)
