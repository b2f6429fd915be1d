"""Whether a package's engines can run on this machine."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec
import onnx
import onnxruntime
import pytest

from splitc.runtime import Session
from splitc.runtime.errors import PackageError, SplitcError
from splitc.runtime.package.files import describe_files
from splitc.runtime.package.manifest_file import seal
from splitc.runtime.serving.served_package import ServedPackage
from splitc.runtime.serving.serving_file import Serving, write_serving
from tests.helpers.command import splitc
from tests.helpers.packages import compile_mode

REFUSED = "its engines contain code that runs in this program.*--host-code, or host_code=True"


@pytest.fixture
def compatible(decoder: Path, tmp_path: Path) -> Path:
    """A package of TensorRT engines that contain code, on GPUs; they are not built."""
    package: Path = shutil.copytree(compile_mode(decoder, "one device"), tmp_path / "package")
    path = package / "manifest.json"
    fields = json.loads(path.read_bytes())
    fields.update(engine="tensorrt", build={"options": {"version_compatible": True}, "built": None})
    for number, rank in enumerate(fields["ranks"]):
        rank["device"] = f"cuda{number}"
    path.write_bytes(seal(json.dumps(fields).encode()))
    return package


@pytest.mark.parametrize(("allowed", "message"), [({}, REFUSED), ({"host_code": True}, "are not built yet")])
def test_code_of_engines_runs_only_if_it_is_allowed(
    compatible: Path, allowed: Mapping[str, Any], message: str, tmp_path: Path
) -> None:
    with pytest.raises(SplitcError, match=message):
        Session(compatible, **allowed)
    write_serving(tmp_path, Serving("package", **allowed))
    with pytest.raises(SplitcError, match=message):
        ServedPackage(tmp_path / "serving.json")


def test_commands_allow_it_too(compatible: Path) -> None:
    refused = splitc("bench", compatible, code=2)
    assert "--host-code" in refused.stderr
    assert "not built yet" in splitc("bench", compatible, "--host-code", code=1).stderr


def test_others_need_not_allow_it(decoder: Path) -> None:
    Session(compile_mode(decoder, "one device"), threads=1).close()


@pytest.mark.parametrize("ranks", ["threads", "processes"])
def test_an_older_onnxruntime_is_named(decoder: Path, tmp_path: Path, ranks: str) -> None:
    """If it lacks an operator, the error has both versions and what to do."""
    package: Path = shutil.copytree(compile_mode(decoder, "one device"), tmp_path / "package")
    path = package / "manifest.json"
    fields = json.loads(path.read_bytes())
    assert fields["onnxruntime"] == onnxruntime.__version__
    engine = package / fields["ranks"][0]["engines"][0]["path"]
    model = onnx.load(engine, load_external_data=False)
    model.graph.node[-1].op_type = "OfTomorrow"
    engine.write_bytes(model.SerializeToString())
    both = f"compiled with ONNX Runtime 99.1.0, and {re.escape(onnxruntime.__version__)} is installed"
    for made, message in (("99.1.0", both), (onnxruntime.__version__, "OfTomorrow[^.]*$")):
        fields.update(onnxruntime=made, files=msgspec.to_builtins(describe_files(package, package.glob("rank*/*"))))
        path.write_bytes(seal(json.dumps(fields).encode()))
        with pytest.raises(PackageError, match=message):
            Session(package, ranks=ranks, threads=1)


def test_an_older_onnxruntime_runs_what_it_knows(decoder: Path, tmp_path: Path) -> None:
    package: Path = shutil.copytree(compile_mode(decoder, "one device"), tmp_path / "package")
    path = package / "manifest.json"
    path.write_bytes(seal(json.dumps({**json.loads(path.read_bytes()), "onnxruntime": "99.1.0"}).encode()))
    Session(package, threads=1).close()
