"""The comparison of a new package with the unsplit model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import onnx_ir as ir
import pytest

from models.writer import save
from splitc.compiler import Plan, Request, compile_model, plan_model
from splitc.compiler.analysis import facts
from splitc.compiler.fusion.fuse import fuse
from splitc.compiler.graphs.editor import add_initializer
from splitc.compiler.graphs.matching import constant_numbers
from splitc.compiler.normal_form.graph import Graph
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

    def judge(compare: Any, whole: Any, feeds: Any, expected: Any, actual: Any, **_: Any) -> Judged:
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


def test_sizes_that_only_the_model_takes_are_compared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As if a pass took the planned batch for a fixed one: the rewritten graph takes no other."""
    b = Block()
    x = b.data("x", (1, 6, 8), ["n", "length", 8])
    wide = b.op("Reshape", b.op("MatMul", x, b.w("A", 8, 32)), b.ints(0, 0, 4, 8))
    b.give(b.op("MatMul", b.op("Reshape", b.op("Relu", wide), b.ints(0, 0, 32)), b.w("B", 32, 8)), shape=["n", "m", 8])
    save(b.model(), tmp_path / "model.onnx")

    def fuse_wrongly(graph: Graph, *others: Any) -> Any:
        for node in graph.graph:
            if node.op_type == "Reshape":
                sizes = ir.tensor([1, *(constant_numbers(node.inputs[1]) or [])[1:]], name=f"{node.name}/sizes")
                node.replace_input_with(1, add_initializer(graph.graph, sizes))
        return fuse(graph, *others)

    monkeypatch.setattr(facts, "fuse", fuse_wrongly)
    plan = plan_model(tmp_path / "model.onnx", ["2xcpu"], Request(split_mode="tensor", shapes={"x": (1, 6, 8)}))
    with pytest.raises(OutputsDifferError, match=r"split model fails with x \d+ x .*, and the unsplit model runs"):
        compile_model(plan, tmp_path / "package")
    assert not (tmp_path / "package").exists()
