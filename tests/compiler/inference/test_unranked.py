"""Inputs and outputs without any shape in the file."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx_ir as ir
import pytest

from splitc.compiler import Request, compile_model, plan_model
from splitc.runtime import FeedError, Session
from tests.conftest import run_whole

MODEL = """<ir_version: 8, opset_import: ["" : 17]> g (float x) => (float y) <float[4] b = {1, 2, 3, 4}> {
    a = Neg(x)
    c = Add(a, b)
    d = Relu(c)
    y = Mul(d, b)
}"""


@pytest.fixture
def unranked(tmp_path: Path) -> Path:
    model = ir.from_onnx_text(MODEL)
    for value in (*model.graph.inputs, *model.graph.outputs):
        value.shape = None
    ir.save(model, tmp_path / "model.onnx")
    return tmp_path / "model.onnx"


@pytest.mark.parametrize("shapes", [{}, {"x": (2, 4)}])
def test_any_shape_is_taken(unranked: Path, tmp_path: Path, shapes: dict[str, tuple[int, ...]]) -> None:
    request = Request(split_mode="layer", shapes=shapes)
    compile_model(plan_model(unranked, ["2xcpu"], request), tmp_path / "package")
    with Session(tmp_path / "package") as session:
        assert [tensor.shape for tensor in (*session.inputs, *session.outputs)] == [None, None]
        for shape in ((4,), (2, 4), (3, 1, 4)):
            feeds = {"x": np.random.default_rng(0).standard_normal(shape).astype(np.float32)}
            np.testing.assert_array_equal(session.run(feeds)["y"], run_whole(unranked, feeds)["y"])
        with pytest.raises(FeedError, match=r"the model takes x \(float32, any shape\)"):
            session.run({})


def test_what_is_split_along_axes_takes_the_shape_that_was_planned(unranked: Path, tmp_path: Path) -> None:
    request = Request(split_mode="tensor", shapes={"x": (2, 4)})
    compile_model(plan_model(unranked, ["2xcpu"], request), tmp_path / "package")
    with Session(tmp_path / "package") as session:
        feeds = {"x": np.ones((2, 4), np.float32)}
        np.testing.assert_array_equal(session.run(feeds)["y"], run_whole(unranked, feeds)["y"])
        with pytest.raises(FeedError, match="has shape 4, and the model takes 2 x 4"):
            session.run({"x": np.ones(4, np.float32)})
