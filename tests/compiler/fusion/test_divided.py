"""A product whose result is split by columns becomes a product for each part, with the same numbers."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import onnx
import onnx.parser
import onnx_ir as ir
import pytest
from onnx import numpy_helper

from splitc.compiler import Request, compile_model, plan_model
from splitc.compiler.analysis.facts import analyze
from splitc.compiler.fusion.fuse import Fused, fuse
from splitc.compiler.patterns.kernels import ON_GPUS
from splitc.compiler.request.shapes import AskedShapes
from splitc.runtime import Session
from tests.compiler.fusion.test_fuse import ANY, run
from tests.helpers.written_attention import operators

SIZE = 8
GATED = """p = MatMul (x, w)  q = Add (p, b)  a, g = Split <axis = -1, num_outputs = 2> (q)
    s = Sigmoid (g)  k = Mul (a, s)  y = MatMul (k, v)"""
PLAIN = "q = MatMul (x, w)  a, g = Split <axis = -1, num_outputs = 2> (q)  k = Mul (a, g)  y = MatMul (k, v)"
STORED = f"t = Transpose <perm = [1, 0]> (w)  {PLAIN.replace('(x, w)', '(x, t)')}"
UNEVEN = """counts = Constant <value_ints = [8, 8, 16]> ()  p = MatMul (x, w)  q = Add (b, p)
    a, c, g = Split <axis = 2> (q, counts)  e = Mul (a, c)  f = Concat <axis = -1> (e, e)  k = Mul (f, g)
    y = MatMul (k, v)"""


def written(body: str, dtype: str = "float", **wide: int) -> onnx.ModelProto:
    text = f"g ({dtype}[batch, length, {SIZE}] x) => ({dtype}[batch, length, {SIZE}] y)"
    model = onnx.parser.parse_model(f'<ir_version: 8, opset_import: ["" : 18]> {text} {{ {body} }}')
    random = np.random.default_rng(0)
    kind = np.float32 if dtype == "float" else np.float16
    stored = (4 * SIZE, SIZE) if "(w)" in body else (SIZE, 4 * SIZE)
    for name, shape in {"w": stored, "b": (4 * SIZE,), "one": (1,), "column": (SIZE, 1), "v": (2 * SIZE, SIZE)}.items():
        array = random.standard_normal(shape).astype(kind) / 4
        model.graph.initializer.append(numpy_helper.from_array(array, name))
    return model


def fused(model: onnx.ModelProto, folder: Path, least_rows: int = 0) -> Fused:
    path = folder / "model.onnx"
    onnx.save(model, path)
    analysis = analyze(path, AskedShapes({"x": (2, 5, SIZE)}), 1)
    gains = replace(ANY, divided=ANY.parts, least_rows=least_rows)
    return fuse(analysis.graph, analysis.shapes, analysis.costs.bound, gains)


def feeds(batch: int = 3, length: int = 4) -> dict[str, np.ndarray]:
    return {"x": np.random.default_rng(1).standard_normal((batch, length, SIZE), np.float32)}


@pytest.mark.parametrize(
    ("body", "parts"),
    [(GATED, 2), (PLAIN, 2), (STORED, 2), (UNEVEN, 3)],
    ids=["gated", "plain", "stored by columns", "uneven"],
)
def test_each_part_has_a_product_of_its_own(tmp_path: Path, body: str, parts: int) -> None:
    model = written(body)
    made = fused(model, tmp_path)
    assert [(outcome.kind, outcome.operator) for outcome in made.outcomes] == [("product", "MatMul")]
    assert operators(made.graph.graph).count("MatMul") == parts + 1
    assert "Split" not in operators(made.graph.graph)
    np.testing.assert_allclose(run(ir.to_proto(made.graph.model), feeds()), run(model, feeds()), rtol=0, atol=1e-6)


ALONG_ROWS = """q = MatMul (x, w)  a, g = Split <axis = 0, num_outputs = 2> (q)  k = Mul (a, g)
    f, h = Split <axis = -1, num_outputs = 2> (k)  y = MatMul (f, v)"""
ONE_BIAS = GATED.replace("Add (p, b)", "Add (p, one)")
ONE_COLUMN = GATED.replace("(x, w)", "(x, column)")
ONE_NUMBER = "its bias or its weight has one number for all columns"


@pytest.mark.parametrize(
    ("body", "rows", "why"),
    [
        (GATED, 11, "it has too few rows for several products to be faster"),
        (ALONG_ROWS, 0, "its Split is not along the last axis"),
        (ONE_BIAS, 0, ONE_NUMBER),
        (ONE_COLUMN, 0, ONE_NUMBER),
    ],
    ids=["few rows", "rows", "one bias", "one column"],
)
def test_what_is_not_divided_says_why(tmp_path: Path, body: str, rows: int, why: str) -> None:
    (outcome,) = fused(written(body), tmp_path, rows).outcomes
    assert (outcome.kind, outcome.operator, outcome.why) == ("product", None, why)


@pytest.mark.parametrize(
    "body",
    [
        GATED.replace("y = MatMul (k, v)", "m = MatMul (k, v)  r = ReduceSum (q)  y = Add (m, r)"),
        GATED.replace(
            "y = MatMul (k, v)",
            "m = MatMul (k, v)  n = ReduceSum (x)  h = Mul (w, n)  r = ReduceSum (h)  y = Add (m, r)",
        ),
    ],
    ids=["the whole is read too", "another node reads the weight"],
)
def test_what_is_read_elsewhere_stays(tmp_path: Path, body: str) -> None:
    assert fused(written(body), tmp_path).outcomes == ()


@pytest.mark.parametrize("mode", ["layer", "tensor"])
def test_packages_for_gpus_have_divided_products(tmp_path: Path, mode: str) -> None:
    """Shards are slices of parts of weights."""
    model = written(GATED.replace("y =", "z =") + " t = Add (z, x)  y = MatMul (t, o)", "float16")
    model.graph.initializer.append(numpy_helper.from_array(np.eye(SIZE, dtype=np.float16), "o"))
    onnx.save(model, tmp_path / "model.onnx")
    request = Request(split_mode=mode, shapes={"x": (2, ON_GPUS.least_rows, SIZE)}, spread=True)
    plan = plan_model(tmp_path / "model.onnx", ["cuda0", "cuda1"], request)
    assert [outcome.kind for outcome in plan.analysis.outcomes if outcome.operator] == ["product"]
    compile_model(plan, tmp_path / "package", verify=False)
    inputs = {"x": feeds(2, 16)["x"].astype(np.float16)}
    with Session(tmp_path / "package", devices=["cpu0", "cpu1"]) as session:
        outputs = session.run(inputs)
    expected = run(model, inputs)
    np.testing.assert_allclose(outputs["y"].astype(np.float32), expected.astype(np.float32), rtol=0, atol=5e-3)
