"""The comparison of a new package with the unsplit model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from models.writer import save
from splitc.compiler import Plan, Request, compile_model, plan_model
from splitc.compiler.packaging import self_check
from splitc.runtime.errors import OutputsDifferError
from splitc.runtime.tools.compare import Difference
from splitc.runtime.tools.judge import Judged
from tests.helpers.blocks import FLOAT, Block

LENGTH = 64


def steps(folder: Path) -> Plan:
    """A model that divides by the number of whole steps in a length, which is 0 for short ones."""
    b = Block()
    x = b.data("x", (2, LENGTH, 8), ["n", "length", 8])
    wide = b.op("Relu", b.op("MatMul", x, b.w("A", 8, 32)))
    count = b.op("Cast", b.op("Div", b.shape(x, 1), b.ints(16)), to=FLOAT)
    b.give(b.op("Mul", b.op("MatMul", wide, b.w("B", 32, 8)), b.op("Div", count, count)))
    save(b.model(), folder / "model.onnx")
    return plan_model(folder / "model.onnx", ["2xcpu"], Request(split_mode="tensor", shapes={"x": (2, LENGTH, 8)}))


@pytest.fixture
def compared(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The lengths that are compared. With short ones outputs differ, as where a kernel gets NaN."""
    lengths: list[int] = []

    def judge(compare: Any, whole: Any, feeds: Any, expected: Any, actual: Any) -> Judged:
        lengths.append(feeds["x"].shape[1])
        passed = lengths[-1] >= 16
        return Judged([Difference("y", 0.5, 0.5, (0, 0, 0), 1.0, 0.5, passed)], [])

    monkeypatch.setattr(self_check, "judge", judge)
    return lengths


def test_sizes_with_which_the_model_is_undefined_do_not_decide(tmp_path: Path, compared: list[int]) -> None:
    compile_model(steps(tmp_path), tmp_path / "package")
    assert compared[0] < 16 <= compared[-1]


def test_other_sizes_decide(tmp_path: Path, compared: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("splitc.runtime.tools.unsplit._is_undefined", lambda array: False)
    with pytest.raises(OutputsDifferError, match="This is a fault of splitc"):
        compile_model(steps(tmp_path), tmp_path / "package")
    assert len(compared) == 1
