"""Norms inside GroupQueryAttention, for which only GPUs have a kernel, become nodes of their own."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import numpy_helper

from splitc.compiler import Request, compile_model, plan_model
from splitc.runtime import Session
from tests.conftest import assert_close, run_whole
from tests.helpers.needs import needs_caches

pytestmark = needs_caches
HEAD = """<ir_version: 9, opset_import: ["" : 18, "com.microsoft" : 1]>
attend (float[b, n, 16] x, float[b, 2, past, 16] keys, float[b, 2, past, 16] values, int32[b] last, int32 total)
    => (float[b, n, 16] y, float[b, 2, all, 16] all_keys, float[b, 2, all, 16] all_values) {"""
HOW = "num_heads = 4, kv_num_heads = 2, do_rotary = 1, scale = 0.3"
REST = "keys, values, last, total, cosines, sines"
TAIL = "y = MatMul (made, w_out) }"
PACKED = "wide = MatMul (x, w)"
APART = PACKED + "  counts = Constant <value_ints = [64, 32, 32]> ()  q, k, v = Split <axis = -1> (wide, counts)"
OWN = f"made, all_keys, all_values = com.microsoft.GroupQueryAttention <{HOW}, qk_norm_epsilon = 1e-3>"
WRITTEN = f"""{APART}
    q_heads = Constant <value_ints = [0, 0, 4, 16]> ()  q_apart = Reshape (q, q_heads)
    q_normed = SimplifiedLayerNormalization <axis = -1, epsilon = 1e-3> (q_apart, w_q)
    q_flat = Constant <value_ints = [0, 0, 64]> ()  q_made = Reshape (q_normed, q_flat)
    k_heads = Constant <value_ints = [0, 0, 2, 16]> ()  k_apart = Reshape (k, k_heads)
    k_normed = SimplifiedLayerNormalization <axis = -1, epsilon = 1e-3> (k_apart, w_k)
    k_flat = Constant <value_ints = [0, 0, 32]> ()  k_made = Reshape (k_normed, k_flat)
    made, all_keys, all_values = com.microsoft.GroupQueryAttention <{HOW}> (q_made, k_made, v, {REST})"""
FORMS = {
    "packed": f"{PACKED} {OWN} (wide, , , {REST}, , , , , , w_q, w_k)",
    "apart": f"{APART} {OWN} (q, k, v, {REST}, , , , , , w_q, w_k)",
}


def write(path: Path, body: str) -> None:
    model = onnx.parser.parse_model(f"{HEAD} {body} {TAIL}")
    random = np.random.default_rng(0)
    shapes = {"w": (16, 128), "w_out": (64, 16), "w_q": (16,), "w_k": (16,), "cosines": (16, 8), "sines": (16, 8)}
    for name, shape in shapes.items():
        model.graph.initializer.append(numpy_helper.from_array(random.random(shape, np.float32), name))
    onnx.save(model, path)


@pytest.mark.parametrize(("form", "mode"), [*((form, "tensor") for form in FORMS), (next(iter(FORMS)), "layer")])
def test_they_are_nodes_of_their_own(tmp_path: Path, form: str, mode: str) -> None:
    """The package then runs on CPU devices, is compared when it is compiled, and agrees with the model."""
    write(tmp_path / "model.onnx", FORMS[form])
    write(tmp_path / "written.onnx", WRITTEN)
    sizes = {"x": (1, 2, 16), "keys": (1, 2, 3, 16), "values": (1, 2, 3, 16), "last": (1,)}
    request = Request(split_mode=mode, spread=True, shapes=sizes)
    compile_model(plan_model(tmp_path / "model.onnx", ["2xcpu"], request), tmp_path / "package")
    random = np.random.default_rng(1)
    fed = {name: random.random(shape, np.float32) for name, shape in sizes.items()}
    fed |= {"last": np.array([4], np.int32), "total": np.array(5, np.int32)}
    with Session(tmp_path / "package") as session:
        assert_close(session.run(fed), run_whole(tmp_path / "written.onnx", fed))


def test_other_operators_may_have_as_many_inputs(tmp_path: Path) -> None:
    """Five quantized columns: the last inputs are a scale and a zero point, which have no axes."""
    columns = ", ".join(f"q{number}, scale, zero" for number in range(5))
    text = f"""<ir_version: 8, opset_import: ["" : 17, "com.microsoft" : 1]>
        joined (float[n, 5] x) => (float[n, 5] y) <float scale = {{0.1}}, int8 zero = {{0}}> {{
            q = QuantizeLinear (x, scale, zero)  q0, q1, q2, q3, q4 = Split <axis = 1> (q)
            made = com.microsoft.QLinearConcat <axis = 1> (scale, zero, {columns})
            y = DequantizeLinear (made, scale, zero) }}"""
    onnx.save(onnx.parser.parse_model(text), tmp_path / "model.onnx")
    compile_model(plan_model(tmp_path / "model.onnx", ["2xcpu"], Request(split_mode="layer")), tmp_path / "package")
    fed = {"x": np.random.default_rng(0).random((3, 5), np.float32)}
    with Session(tmp_path / "package") as session:
        assert_close(session.run(fed), run_whole(tmp_path / "model.onnx", fed))
