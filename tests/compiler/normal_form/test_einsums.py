"""An Einsum with a weight matrix becomes a MatMul, which row mode slices."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import pytest

from splitc.compiler import Request, compile_model, plan_model
from splitc.runtime import Session
from tests.conftest import run_whole
from tests.helpers.graphs import read_graph

WriteModel = Callable[[str], Path]
MODEL = """<ir_version: 8, opset_import: ["" : 17]>
g (float[b, 5, {0}] x, float[4, 4] given) => (float y) <float[{1}] w> {{
    y = Einsum <equation = "{2}"> ({3})
}}"""


def written(write_model: WriteModel, shape: str, equation: str, inputs: str = "x, w", last: int = 4) -> Path:
    path = write_model(MODEL.format(last, shape, equation, inputs))
    model, sizes = onnx.load(path), [int(size) for size in shape.split(",")]
    array = np.random.default_rng(0).standard_normal(sizes, np.float32)
    model.graph.initializer.append(onnx.numpy_helper.from_array(array, "w"))
    onnx.save(model, path)
    return path


@pytest.mark.parametrize(
    ("shape", "equation", "inputs", "operators"),
    [
        ("4,6", "abc,cd->abd", "x, w", ["MatMul"]),
        ("4,6", "...c,cd->...d", "x, w", ["MatMul"]),
        ("6,4", "btd,fd->btf", "x, w", ["Transpose", "MatMul"]),
        ("4,6", "cd,abc->abd", "w, x", ["MatMul"]),
        ("4,6", "abc,cd->adb", "x, w", ["Einsum"]),
        ("4,6", "abc,cd->ab", "x, w", ["Einsum"]),
        ("5,6", "abc,bd->acd", "x, w", ["Einsum"]),
        ("4,5", "abc,cb->ab", "x, w", ["Einsum"]),
        ("4,4", "abc,cc->abc", "x, w", ["Einsum"]),
        ("4,4", "abc,cd->abd", "x, given", ["Einsum"]),
        ("4,2,3", "abc,cde->abde", "x, w", ["Einsum"]),
    ],
)
def test_products_with_a_matrix_are_matmuls(
    write_model: WriteModel, shape: str, equation: str, inputs: str, operators: list[str]
) -> None:
    graph = read_graph(written(write_model, shape, equation, inputs))
    assert [node.op_type for node in graph.nodes] == operators


def test_row_mode_slices_them(write_model: WriteModel, tmp_path: Path) -> None:
    model = written(write_model, "64,96", "btd,df->btf", last=64)
    plan = plan_model(model, "2xcpu", Request(split_mode="row", row_min=16))
    assert [rank.memory.weights for rank in plan.ranks] == [64 * 48 * 4] * 2
    compile_model(plan, tmp_path / "package")
    feeds = {
        "x": np.random.default_rng(1).standard_normal((3, 5, 64), np.float32),
        "given": np.zeros((4, 4), np.float32),
    }
    with Session(tmp_path / "package") as session:
        np.testing.assert_allclose(session.run(feeds)["y"], run_whole(model, feeds)["y"], 1e-5, 1e-5)
