"""Weights that sessions on a GPU share: as they are stored, whatever an exporter does with them before a product."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import onnx.parser
import onnx_ir as ir
import pytest
from onnx import numpy_helper

from models.llama import Size, build
from models.writer import save
from splitc.compiler import Request, compile_model, plan_model
from splitc.compiler.engine_graphs.session_weights import multiply_as_stored
from splitc.runtime import Session
from splitc.runtime.gpu.weight_places import can_share
from splitc.runtime.package.manifest_file import read_manifest
from tests.conftest import assert_close, run_whole

WIDE, SIZE = 64, 32
LAYERS = "t = Transpose <perm = [1, 0]> (up)  p = MatMul (x, t)  g = Relu (p)  u = Transpose (down)  y = MatMul (g, u)"


def written(body: str, dtype: str) -> onnx.ModelProto:
    head = f"m ({dtype}[batch, length, {SIZE}] x) => ({dtype}[batch, length, {SIZE}] y)"
    model = onnx.parser.parse_model(f'<ir_version: 9, opset_import: ["" : 17]> {head} {{ {body} }}')
    random = np.random.default_rng(0)
    weights = {"up": random.standard_normal((WIDE, SIZE)) / 6, "down": random.standard_normal((SIZE, WIDE)) / 8}
    type_ = np.float16 if dtype == "float16" else np.float32
    model.graph.initializer.extend(numpy_helper.from_array(array.astype(type_), n) for n, array in weights.items())
    return model


@pytest.mark.parametrize("dtype", ["float16", "float"])
@pytest.mark.parametrize(("mode", "devices"), [("layer", ["cuda0"]), ("tensor", ["cuda0", "cuda1"])])
def test_sessions_share_what_is_transposed(tmp_path: Path, dtype: str, mode: str, devices: list[str]) -> None:
    model, package = tmp_path / "model.onnx", tmp_path / "package"
    onnx.save(written(LAYERS, dtype), model)
    compile_model(plan_model(model, devices, Request(split_mode=mode, spread=True)), package, verify=False)
    for rank in read_manifest(package).ranks:
        (engine,) = rank.engines
        graph = ir.load(package / engine.path).graph
        kinds = [node.op_type for node in graph]
        assert kinds.count("FusedMatMul") == 2 and "Transpose" not in kinds
        assert {weight.name for weight in engine.weights or ()} == {*graph.initializers} - {"splitc_first"}
    x = np.random.default_rng(1).standard_normal((2, 3, SIZE)).astype(np.float16 if dtype == "float16" else np.float32)
    with Session(package, devices=[f"cpu{number}" for number, _ in enumerate(devices)]) as session:
        assert_close(session.run({"x": x}), run_whole(model, {"x": x}), 2e-2 if dtype == "float16" else 1e-5)


@pytest.mark.parametrize(
    "body",
    [
        LAYERS + "  z = Transpose <perm = [1, 0]> (down)  w = Abs (z)",
        LAYERS + "  w = Abs (down)",
        LAYERS.replace("MatMul (g, u)", "MatMul (g, v)  v = Abs (u)"),
        LAYERS.replace("Transpose (down)", "Transpose <perm = [0, 1]> (down)"),
    ],
)
def test_a_weight_that_is_read_in_another_way_stays(body: str) -> None:
    graph = ir.from_proto(written(body, "float")).graph
    multiply_as_stored(graph)
    fused = [node for node in graph if node.op_type == "FusedMatMul"]
    assert [value.name for node in fused for value in node.inputs[1:] if value is not None] == ["up"]


def test_truths_of_a_sharded_embedding_keep_no_weight_from_being_shared(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Sessions can't share booleans on a GPU. They are few bytes, so each has its own."""
    monkeypatch.setattr("splitc.compiler.sharding.candidates.LOOKUP_BYTES", 1)
    model, package = tmp_path / "model.onnx", tmp_path / "package"
    save(build(Size(layers=1, hidden=256, heads=4, kv_heads=2, feed_forward=512, vocabulary=4000)), model)
    compile_model(plan_model(model, ["cuda0", "cuda1"], Request(split_mode="tensor", spread=True)), package)
    for rank in read_manifest(package).ranks:
        (engine,) = rank.engines
        initializers = ir.load(package / engine.path).graph.initializers.values()
        outside = [value for value in initializers if isinstance(value.const_value, ir.ExternalTensor)]
        assert any(value.dtype == ir.DataType.BOOL for value in outside)
        assert can_share(engine.weights)
        assert len(engine.weights or ()) > 5
