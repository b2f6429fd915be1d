"""What libraries read in the environment."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import onnx_ir as ir
import pytest

from models.writer import save
from splitc.compiler import Request, compile_model, plan_model
from splitc.runtime import Session
from splitc.runtime.engines.variables import EXPERTS, use_first_expert_kernels
from tests.helpers.grouped_rows import Grouped, write
from tests.helpers.needs import needs_gated_experts
from tests.helpers.variables import read_variable


@pytest.fixture(autouse=True)
def user(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A process without the user's choice of kernels."""
    monkeypatch.delenv(EXPERTS, raising=False)
    os.unsetenv(EXPERTS)
    yield
    os.unsetenv(EXPERTS)


def test_kernels_are_not_tried() -> None:
    use_first_expert_kernels()
    assert read_variable(EXPERTS) == "1" and EXPERTS not in os.environ


def test_the_user_may_choose(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(EXPERTS, "0")
    use_first_expert_kernels()
    assert read_variable(EXPERTS) == "0"


@needs_gated_experts
@pytest.mark.usefixtures("gpus")
@pytest.mark.parametrize("dtype", ["FLOAT16", "FLOAT"])
def test_only_engines_with_the_operator_choose(tmp_path: Path, dtype: str) -> None:
    save(write(Grouped(activation="first", dtype=ir.DataType[dtype])).model(), tmp_path / "model.onnx")
    plan = plan_model(tmp_path / "model.onnx", ["cuda0"], Request(memory=["1GiB"]))
    compile_model(plan, tmp_path / "package", verify=False)
    with Session(tmp_path / "package"):
        assert read_variable(EXPERTS) == ("1" if dtype == "FLOAT16" else None)
