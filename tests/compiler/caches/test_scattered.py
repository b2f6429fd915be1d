"""Caches written by index along an inner axis are written without transposes, in all modes."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest

from splitc.compiler import Request, compile_model, plan_model
from splitc.runtime import Session
from tests.conftest import assert_close, run_whole
from tests.helpers.written_attention import operators

MODEL = """<ir_version: 10, opset_import: ["" : 23]>
write (float[1, l, 8] x, int64[l] at, float[1, 4, m, 2] past) => (float[1, 4, 2] y, float[1, 4, m, 2] present)
<float[8, 8] w = {{{w}}}> {{
    rows = MatMul (x, w)
    heads = Constant <value = int64[4] {{0, 0, 4, 2}}> ()
    apart = Reshape (rows, heads)
    one = Constant <value = int64[1] {{1}}> ()
    places = Unsqueeze (at, one)
    turned = Transpose <perm = [2, 0, 1, 3]> (past)
    new = Transpose <perm = [1, 0, 2, 3]> (apart)
    written = ScatterND {how} (turned, places, new)
    present = Transpose <perm = [1, 2, 0, 3]> (written)
    axis = Constant <value = int64[1] {{2}}> ()
    y = ReduceMax <keepdims = 0> ({read}, axis) }}"""


def write(path: Path, how: str = "", read: str = "present") -> None:
    numbers = ", ".join(map(str, np.random.default_rng(0).standard_normal(64).round(3)))
    onnx.save(onnx.parser.parse_model(MODEL.format(w=numbers, how=how, read=read)), path)


def feeds(number: int, new: int) -> dict[str, np.ndarray]:
    random = np.random.default_rng(number)
    return {"x": random.standard_normal((1, new, 8)).astype(np.float32), "at": random.permutation(6)[:new]}


@pytest.mark.parametrize("mode", ["layer", "tensor"])
def test_rows_are_written_where_they_are(tmp_path: Path, mode: str) -> None:
    """One row, several rows, and in any order."""
    write(tmp_path / "model.onnx")
    request = Request(split_mode=mode, memory=["1GiB"], shapes={"past": (1, 4, 6, 2), "x": (1, 2, 8)})
    plan = plan_model(tmp_path / "model.onnx", ["2xcpu" if mode == "tensor" else "cpu0"], request)
    names = operators(plan.analysis.graph.graph)
    assert "ScatterElements" in names and "ScatterND" not in names
    assert [state.in_place for state in plan.analysis.states] == [True]
    compile_model(plan, tmp_path / "package", verify=False)
    state = np.random.default_rng(9).random((1, 4, 6, 2), np.float32)
    with Session(tmp_path / "package") as session, session.start() as sequence:
        sequence.load({"past": state})
        for number, new in enumerate((1, 4, 2)):
            fed = feeds(number, new)
            whole = run_whole(tmp_path / "model.onnx", {**fed, "past": state})
            assert_close(session.run({**fed, "past": state}), whole)
            assert_close(sequence.run(fed), {"y": whole["y"]})
            state = whole["present"]


OTHERS = {
    "added to": {"how": '<reduction = "add">'},
    "read as it is turned": {"read": "written"},
}


@pytest.mark.parametrize("other", OTHERS)
def test_other_forms_are_not_rewritten(tmp_path: Path, other: str) -> None:
    how = OTHERS[other]
    write(tmp_path / "model.onnx", **how)
    shapes = {"past": (1, 4, 6, 2), "x": (1, 2, 8)}
    plan = plan_model(tmp_path / "model.onnx", ["cpu0"], Request(split_mode="layer", shapes=shapes))
    assert "ScatterElements" not in operators(plan.analysis.graph.graph)
