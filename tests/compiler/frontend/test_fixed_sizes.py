"""Numbers that follow from fixed sizes are constants, so that attention has them as its scale."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import onnx_ir as ir
import pytest

from splitc.compiler.analysis.facts import analyze
from splitc.compiler.fusion.fuse import Fused, fuse
from splitc.compiler.fusion.kernels import Gains
from splitc.compiler.request.shapes import AskedShapes
from tests.conftest import run_whole
from tests.helpers.written_attention import operators

# As torch's newer exporter writes attention without its optimizer: queries and keys are multiplied by the root of 1 /
# the root of a size, by default that of a head, at place 3.
ATTENTION = """<ir_version: 10, opset_import: ["" : 20]>
    attend (float[b, l, 4, 8] q, float[b, a, 4, 8] k, float[b, a, 4, 8] v) => (float[b, l, 4, 8] y)
    <int64[1] place = {%d}, float one = {1.0}> {
        queries = Transpose <perm = [0, 2, 1, 3]> (q)
        keys = Transpose <perm = [0, 2, 1, 3]> (k)
        values = Transpose <perm = [0, 2, 1, 3]> (v)
        sizes = Shape (queries)  size = Gather (sizes, place)  whole = CastLike (size, queries)  root = Sqrt (whole)
        unit = CastLike (one, queries)  part = Div (unit, root)  factor = Sqrt (part)
        columns = Transpose <perm = [0, 1, 3, 2]> (keys)
        scaled = Mul (queries, factor)  others = Mul (columns, factor)
        scores = MatMul (scaled, others)  weights = Softmax <axis = -1> (scores)  sums = MatMul (weights, values)
        y = Transpose <perm = [0, 2, 1, 3]> (sums) }"""


def feeds(batch: int, length: int, keys: int) -> dict[str, np.ndarray]:
    random = np.random.default_rng(0)
    shapes = {"q": (batch, length, 4, 8), "k": (batch, keys, 4, 8), "v": (batch, keys, 4, 8)}
    return {name: random.standard_normal(shape).astype(np.float32) for name, shape in shapes.items()}


def fused(place: int, folder: Path) -> Fused:
    onnx.save(onnx.parser.parse_model(ATTENTION % place), folder / "model.onnx")
    shapes = {name: array.shape for name, array in feeds(2, 8, 7).items()}
    analysis = analyze(folder / "model.onnx", AskedShapes(shapes), 1)
    return fuse(analysis.graph, analysis.shapes, analysis.costs.bound, Gains(attention=frozenset({ir.DataType.FLOAT})))


@pytest.mark.parametrize(("place", "is_fixed"), [(3, True), (2, False)], ids=["a head's size", "the length"])
def test_a_scale_from_a_fixed_size_is_the_operators_own(tmp_path: Path, place: int, is_fixed: bool) -> None:
    made = fused(place, tmp_path)
    names = operators(made.graph.graph)
    assert "com.microsoft.MultiHeadAttention" in names
    assert ("Sqrt" not in names) == is_fixed == ("Mul" not in names)
    assert set(made.graph.nodes) == set(made.graph.graph)
    onnx.save(ir.to_proto(made.graph.model), tmp_path / "fused.onnx")
    for sizes in ((2, 8, 7), (1, 3, 11)):
        request = feeds(*sizes)
        expected = run_whole(tmp_path / "model.onnx", request)["y"]
        np.testing.assert_allclose(run_whole(tmp_path / "fused.onnx", request)["y"], expected, rtol=0, atol=2e-6)
