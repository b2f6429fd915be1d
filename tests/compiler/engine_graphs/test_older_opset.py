"""Engines for GPUs import an older opset where ONNX Runtime's kernels have not followed the newest."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import onnx.parser
import onnx_ir as ir
import pytest

from splitc.compiler import Request, compile_model, plan_model
from splitc.compiler.engine_graphs.cpu_values import why_not_captured
from splitc.compiler.engine_graphs.gpu_sizes import keep_on_gpu
from splitc.runtime import Session
from tests.conftest import assert_close, run_whole

POOLED = "p = MaxPool <kernel_shape = [2, 2]> (x)  y = Elu (p)"
NORMED = "s = Constant <value_floats = [1.0, 1.0]> ()  n = RMSNormalization (x, s)  y = Elu (n)"


def written(body: str, opset: int, dtype: str = "float") -> onnx.ModelProto:
    head = f'<ir_version: 10, opset_import: ["" : {opset}]>'
    text = f"{head} g ({dtype}[n, 3, 4, 2] x) => ({dtype}[n, c, h, w] y) {{ {body} }}"
    return onnx.shape_inference.infer_shapes(onnx.parser.parse_model(text))


@pytest.mark.parametrize(
    ("body", "opset", "dtype", "expected"),
    [
        (POOLED, 21, "float", 21),
        (POOLED, 22, "float", 21),
        (POOLED, 23, "float16", 21),
        ("y = Relu (x)", 23, "float", 23),
        (POOLED, 22, "bfloat16", 22),
        (NORMED, 23, "float", 23),
    ],
    ids=["older", "22", "half", "nothing is too new", "a type that 21 has not", "an operator that 21 has not"],
)
def test_engines_import_what_has_kernels(body: str, opset: int, dtype: str, expected: int) -> None:
    graph = ir.from_proto(written(body, opset, dtype)).graph
    keep_on_gpu(graph, {})
    assert graph.opset_imports[""] == expected
    is_left = opset == expected and opset > 21 and "Relu" not in body
    assert ("has no kernel for GPUs" in why_not_captured(graph)) == is_left


def test_the_model_keeps_its_opset(tmp_path: Path) -> None:
    """Only what is written for GPUs has another one, and gives the same outputs."""
    model = written(POOLED, 22)
    onnx.save(model, tmp_path / "model.onnx")
    plan = plan_model(tmp_path / "model.onnx", ["cuda0"], Request(split_mode="layer", shapes={"x": (2, 3, 4, 2)}))
    compile_model(plan, tmp_path / "package")
    assert plan.analysis.graph.model.opset_imports[""] == 22
    (engine,) = (tmp_path / "package").rglob("*.onnx")
    assert {entry.domain: entry.version for entry in onnx.load(engine).opset_import}[""] == 21
    feeds = {"x": np.random.default_rng(0).standard_normal((3, 3, 4, 2), np.float32)}
    with Session(tmp_path / "package", devices=["cpu0"]) as session:
        assert_close(session.run(feeds), run_whole(tmp_path / "model.onnx", feeds))
