"""One Softmax whose result several products read: differential attention weighs two kinds of values alike."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import onnx.parser
import onnx_ir as ir
import pytest

from splitc.compiler.analysis.facts import analyze
from splitc.compiler.fusion.fuse import fuse
from splitc.compiler.request.shapes import AskedShapes
from tests.compiler.fusion.test_fuse import ANY, run

# The second reader of the weights, and the operators that replace attention.
READERS = {
    "another product": ("second = MatMul (w, u)", ["MultiHeadAttention"] * 2),
    "two more": ("one = MatMul (w, u)  other = MatMul (w, t)  second = Mul (one, other)", ["MultiHeadAttention"] * 3),
    "something else": ("second = ReduceMax <axes = [-1]> (w)", [None]),
}


@pytest.mark.parametrize("reader", READERS)
def test_each_product_is_attention(tmp_path: Path, reader: str) -> None:
    steps, operators = READERS[reader]
    made = onnx.parser.parse_model(f"""<ir_version: 8, opset_import: ["" : 17]>
        g (float[b, 4, i, 8] q, float[b, 4, i, 8] k, float[b, 4, i, 6] v, float[b, 4, i, 6] u,
            float[b, 4, i, 6] t, float[b, 1, i, i] mask) => (float[b, 4, i, 6] total) {{
            k_turned = Transpose <perm = [0, 1, 3, 2]> (k)  product = MatMul (q, k_turned)
            scores = Add (product, mask)  w = Softmax <axis = -1> (scores)  y = MatMul (w, v)
            {steps}  total = Sub (y, second) }}""")
    onnx.save(made, tmp_path / "model.onnx")

    def shapes(b: int, i: int) -> dict[str, tuple[int, ...]]:
        wide, narrow = (b, 4, i, 8), (b, 4, i, 6)
        return {"q": wide, "k": wide, "v": narrow, "u": narrow, "t": narrow, "mask": (b, 1, i, i)}

    analysis = analyze(tmp_path / "model.onnx", AskedShapes(shapes(2, 6)), 1)
    result = fuse(analysis.graph, analysis.shapes, analysis.costs.bound, ANY)
    assert [one.operator for one in result.outcomes] == operators
    assert any(node.op_type == "Softmax" for node in result.graph.nodes) == (operators == [None])
    random = np.random.default_rng(0)
    feeds = {name: random.standard_normal(shape).astype(np.float32) for name, shape in shapes(3, 5).items()}
    np.testing.assert_allclose(run(ir.to_proto(result.graph.model), feeds), run(made, feeds), rtol=0, atol=1e-5)
