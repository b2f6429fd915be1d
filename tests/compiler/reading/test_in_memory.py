"""Models in memory are planned and compiled like their files."""

from __future__ import annotations

import gc
import tempfile
from pathlib import Path
from typing import Any

import onnx
import onnx_ir as ir
import pytest

from splitc.compiler import Request, compile_model, plan_model
from splitc.compiler.errors import ModelError
from splitc.runtime import MisuseError, Session
from tests.conftest import LAYER, assert_close, decoder_feeds, run_whole


@pytest.fixture
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder for temporary folders."""
    folder = tmp_path / "temporary"
    folder.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    return folder


@pytest.mark.parametrize("load", [onnx.load, ir.load], ids=["onnx", "onnx_ir"])
def test_package_is_that_of_the_file(load: Any, decoder: Path, tmp_path: Path, temporary: Path) -> None:
    model = load(decoder)
    plan = plan_model(model, "2xcpu", Request(split_mode="tensor"))
    assert len(list(temporary.iterdir())) == 1
    del model
    gc.collect()
    compile_model(plan, tmp_path / "package", verify=False)
    feeds = decoder_feeds()
    with Session(tmp_path / "package") as session:
        assert_close(session.run(feeds), run_whole(decoder, feeds))
    del plan
    gc.collect()
    assert not list(temporary.iterdir()), "the file is deleted with the plan"


def test_model_is_left_as_it_is(decoder: Path, temporary: Path) -> None:
    model = ir.load(decoder)
    before = {name: value.const_value for name, value in model.graph.initializers.items()}
    plan_model(model, "2xcpu", LAYER)
    assert all(model.graph.initializers[name].const_value is weight for name, weight in before.items())


def test_what_can_not_be_planned_leaves_nothing(decoder: Path, temporary: Path) -> None:
    with pytest.raises(MisuseError, match="unknown split mode"):
        plan_model(onnx.load(decoder), "2xcpu", Request(split_mode="none"))
    gc.collect()
    assert not list(temporary.iterdir())


def test_weights_in_a_file_that_is_elsewhere(decoder: Path, temporary: Path) -> None:
    with pytest.raises(ModelError, match="give the model's path instead, or load its weights too"):
        plan_model(onnx.load(decoder, load_external_data=False), "2xcpu", LAYER)
    assert not list(temporary.iterdir())


def test_other_objects_are_no_models() -> None:
    with pytest.raises(MisuseError, match=r"a path, an onnx\.ModelProto, .* and this is of type int"):
        plan_model(7, "2xcpu")  # type: ignore[arg-type]


class Program:
    """What torch.onnx.export returns, as far as splitc reads it."""

    def __init__(self, model: ir.Model) -> None:
        self.model = model


def test_exporters_program_is_its_model(decoder: Path) -> None:
    assert plan_model(Program(ir.load(decoder)), "2xcpu", LAYER).ranks


def test_what_is_no_request_or_plan_is_named(decoder: Path, tmp_path: Path) -> None:
    wrong: Any = {"split_mode": "tensor"}
    with pytest.raises(MisuseError, match=r"as in Request\(split_mode='tensor'\), not \{"):
        plan_model(decoder, "2xcpu", wrong)
    path: Any = str(decoder)
    with pytest.raises(MisuseError, match="a package is made of a plan"):
        compile_model(path, tmp_path / "package")
    assert not (tmp_path / "package").exists()
