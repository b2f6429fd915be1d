"""The choice of the operator MoE's kernels."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterator
from pathlib import Path

import onnx_ir as ir
import pytest

from models.writer import save
from splitc.compiler import Request, compile_model, plan_model
from splitc.runtime import Session
from splitc.runtime.engines.expert_kernels import VARIABLE, use_first_expert_kernels
from tests.helpers.grouped_rows import Grouped, write
from tests.helpers.needs import needs_gated_experts


@pytest.fixture(autouse=True)
def user(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A process without the user's choice of kernels."""
    monkeypatch.delenv(VARIABLE, raising=False)
    os.unsetenv(VARIABLE)
    yield
    os.unsetenv(VARIABLE)


def chosen() -> str | None:
    """The setting that a library reads."""
    getenv = ctypes.CDLL(None).getenv
    getenv.restype = ctypes.c_char_p
    value: bytes | None = getenv(VARIABLE.encode())
    return None if value is None else value.decode()


def test_kernels_are_not_tried() -> None:
    use_first_expert_kernels()
    assert chosen() == "1" and VARIABLE not in os.environ


def test_the_user_may_choose(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, "0")
    use_first_expert_kernels()
    assert chosen() == "0"


@needs_gated_experts
@pytest.mark.usefixtures("gpus")
@pytest.mark.parametrize("dtype", ["FLOAT16", "FLOAT"])
def test_only_engines_with_the_operator_choose(tmp_path: Path, dtype: str) -> None:
    save(write(Grouped(activation="first", dtype=ir.DataType[dtype])).model(), tmp_path / "model.onnx")
    plan = plan_model(tmp_path / "model.onnx", ["cuda0"], Request(memory=["1GiB"]))
    compile_model(plan, tmp_path / "package", verify=False)
    with Session(tmp_path / "package"):
        assert chosen() == ("1" if dtype == "FLOAT16" else None)
