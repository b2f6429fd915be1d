"""Products for queries, keys and values become one where attention with a cache reads them, and give the same."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import onnx.parser
import onnx_ir as ir
import onnxruntime as ort
import pytest
from onnx import numpy_helper

from splitc.compiler import Request, compile_model, plan_model
from splitc.compiler.engine_graphs.weight_products import join_products
from splitc.compiler.graphs.optional import add_optional
from splitc.compiler.packaging.onnx_files import write_model_files
from splitc.compiler.packaging.writer import PackageWriter
from splitc.runtime import Session
from tests.conftest import run_whole
from tests.helpers.needs import needs_later_operators

# Two heads of 8 for queries, one for keys and values.
WIDTH, SIZE = 24, 8
PLAIN = "q = MatMul (x, wq)  k = MatMul (x, wk)  v = MatMul (x, wv)"
ATTENTION = (
    "a, keys, values = com.microsoft.GroupQueryAttention <num_heads = 2, kv_num_heads = 1> "
    "(q, k, v, past_keys, past_values, last, total)"
)
TRANSPOSED = "com.microsoft.FusedMatMul <transB = 1>"


def written(body: str, opset: int = 17) -> onnx.ModelProto:
    cache = f"float[1, 1, past, {SIZE}]"
    head = (
        f"m (float[1, length, {WIDTH}] x, {cache} past_keys, {cache} past_values, int32[1] last, int32 total) => "
        f"(float[1, length, {2 * SIZE}] a, float[1, 1, all, {SIZE}] keys, float[1, 1, all, {SIZE}] values)"
    )
    opsets = f'["" : {opset}, "com.microsoft" : 1]'
    model = onnx.parser.parse_model(f"<ir_version: 8, opset_import: {opsets}> {head} {{ {body}  {ATTENTION} }}")
    random = np.random.default_rng(0)
    for name, columns in (("q", 2 * SIZE), ("k", SIZE), ("v", SIZE)):
        shape = (columns, WIDTH) if TRANSPOSED in body else (WIDTH, columns)
        weight = (random.standard_normal(shape) / 5).astype(np.float32)
        bias = random.standard_normal(columns).astype(np.float32)
        model.graph.initializer.extend([numpy_helper.from_array(a, n + name) for a, n in ((weight, "w"), (bias, "b"))])
    return model


def feeds() -> dict[str, np.ndarray]:
    random = np.random.default_rng(1)
    past = {name: random.standard_normal((1, 1, 3, SIZE)).astype(np.float32) for name in ("past_keys", "past_values")}
    x = random.standard_normal((1, 1, WIDTH)).astype(np.float32)
    return {"x": x, **past, "last": np.array([3], np.int32), "total": np.array(4, np.int32)}


@pytest.mark.parametrize("opset", [12, 17])
@pytest.mark.parametrize(
    ("body", "products"),
    [
        (PLAIN, 1),
        (PLAIN.replace("MatMul", TRANSPOSED), 1),
        (PLAIN.replace("q = ", "n = ") + "  b = Add (n, bq)  h = Relu (b)  q = Relu (h)", 1),
        (PLAIN.replace("v = MatMul (x, wv)", "y = Relu (x)  v = MatMul (y, wv)"), 3),
        (PLAIN.replace("v = MatMul (x, wv)", "u = MatMul (x, wk)  v = Neg (u)"), 3),  # a weight that two products read
        (PLAIN.replace("v = MatMul (x, wv)", f"v = {TRANSPOSED.replace('= 1', '= 0')} (x, wv)"), 3),
    ],
)
def test_products_of_one_value_are_one(tmp_path: Path, body: str, products: int, opset: int) -> None:
    proto = written(body, opset)
    model = ir.from_proto(proto)
    join_products(model.graph)
    assert sum("MatMul" in node.op_type for node in model.graph) == products
    path = tmp_path / "joined.onnx"
    write_model_files({path: model.graph}, model, PackageWriter(tmp_path))
    one, other = (ort.InferenceSession(source).run(None, feeds()) for source in (proto.SerializeToString(), path))
    for before, after in zip(one, other, strict=True):
        np.testing.assert_allclose(after, before, rtol=1e-5, atol=1e-6)


def test_a_weight_that_a_request_may_replace_is_left_alone() -> None:
    graph = ir.from_proto(written(PLAIN)).graph
    weight = graph.initializers.pop("wk")
    assert weight.const_value is not None and weight.shape is not None
    weight.replace_all_uses_with(add_optional(graph, weight.const_value, weight.shape))
    join_products(graph)
    assert [node.op_type for node in graph].count("MatMul") == 3


@needs_later_operators
def test_weights_that_an_exporter_transposes_are_joined(tmp_path: Path) -> None:
    body = " ".join(f"t{name} = Transpose <perm = [1, 0]> (w{name})  {name} = MatMul (x, t{name})" for name in "qkv")
    model = written(body)
    for weight in model.graph.initializer:
        if weight.name.startswith("w"):
            weight.CopyFrom(numpy_helper.from_array(numpy_helper.to_array(weight).T.copy(), weight.name))
    onnx.save(model, tmp_path / "model.onnx")
    compile_model(plan_model(tmp_path / "model.onnx", ["cuda0"], Request()), tmp_path / "package", verify=False)
    graph = ir.load(tmp_path / "package" / "rank0" / "stage0.onnx").graph
    # Attention in single precision is written out for GPUs, in branches.
    assert [node.op_type for node in graph if node.op_type in ("FusedMatMul", "Split", "If")] == [
        "FusedMatMul",
        "Split",
        "If",
    ]
    given = feeds()
    with Session(tmp_path / "package", devices=["cpu0"]) as session:
        for output, array in run_whole(tmp_path / "model.onnx", given).items():
            np.testing.assert_allclose(session.run(given)[output], array, rtol=1e-5, atol=1e-6)
