"""Norms of a Split's parts that are concatenated again become one, with the same numbers, sharded by parts."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import onnx_ir as ir
import pytest

from splitc.compiler.analysis.facts import analyze
from splitc.compiler.fusion.fuse import Fused, fuse
from splitc.compiler.request.shapes import AskedShapes
from tests.compiler.fusion.test_fuse import ANY, run
from tests.helpers.blocks import Block, check_split
from tests.helpers.written_attention import operators

ROWS = "".join(f"w{n} = Constant <value_floats = {[n + 1.0, 2.0, 3.0, n - 4.0]}> ()\n" for n in range(3))
NORM = "n{0} = LayerNormalization <axis = -1> (p{0}, w{0})"
BIASED = "n{0} = LayerNormalization <axis = 3, epsilon = 0.1> (p{0}, w{0}, w1)"
SPLIT, JOIN = "p0, p1, p2 = Split <axis = 1, num_outputs = 3> (x)", "y = Concat <axis = 1> (n0, n1, n2)"


def fused(body: str, folder: Path, heads: int = 3) -> tuple[onnx.ModelProto, Fused]:
    """A model that normalizes heads one by one, and its fused form."""
    signature = f"g (float[batch, {heads}, length, 4] x) => (float[batch, {heads}, length, 4] y)"
    model = onnx.parser.parse_model(f'<ir_version: 8, opset_import: ["" : 18]> {signature} {{ {ROWS} {body} }}')
    path = folder / "model.onnx"
    onnx.save(model, path)
    analysis = analyze(path, AskedShapes({"x": (2, heads, 5, 4)}), 1)
    return model, fuse(analysis.graph, analysis.shapes, analysis.costs.bound, ANY)


def norms(form: str) -> str:
    return "\n".join(form.format(number) for number in range(3))


@pytest.mark.parametrize("form", [NORM, BIASED], ids=["plain", "biased"])
@pytest.mark.parametrize("heads", [3, 6])
def test_one_norm_gives_the_same(tmp_path: Path, form: str, heads: int) -> None:
    model, made = fused(f"{SPLIT}\n{norms(form)}\n{JOIN}", tmp_path, heads)
    assert [(outcome.kind, outcome.operator) for outcome in made.outcomes] == [("norm", "LayerNormalization")]
    assert operators(made.graph.graph) == ["LayerNormalization", "Mul", "Add"][: 2 + (form is BIASED)]
    inputs = {"x": np.random.default_rng(0).standard_normal((3, heads, 2, 4), np.float32)}
    np.testing.assert_allclose(run(ir.to_proto(made.graph.model), inputs), run(model, inputs), rtol=0, atol=2e-6)


def test_a_transpose_before_them_comes_after(tmp_path: Path) -> None:
    """Behind them it may be one with what follows."""
    rows, back = "x = Transpose <perm = [0, 2, 1, 3]> (rows)", "y = Transpose <perm = [0, 2, 1, 3]> (joined)"
    body = f"{ROWS} {rows}\n{SPLIT}\n{norms(BIASED)}\n{JOIN.replace('y =', 'joined =')} {back}"
    shape = "float[batch, length, 3, 4]"
    model = onnx.parser.parse_model(
        f'<ir_version: 8, opset_import: ["" : 18]> g ({shape} rows) => ({shape} y) {{ {body} }}'
    )
    onnx.save(model, tmp_path / "model.onnx")
    analysis = analyze(tmp_path / "model.onnx", AskedShapes({"rows": (2, 5, 3, 4)}), 1)
    made = fuse(analysis.graph, analysis.shapes, analysis.costs.bound, ANY)
    assert operators(made.graph.graph)[:3] == ["LayerNormalization", "Mul", "Add"]
    inputs = {"rows": np.random.default_rng(0).standard_normal((3, 2, 3, 4), np.float32)}
    np.testing.assert_allclose(run(ir.to_proto(made.graph.model), inputs), run(model, inputs), rtol=0, atol=2e-6)


@pytest.mark.parametrize(
    ("body", "why"),
    [
        (
            f"{SPLIT}\n{norms(NORM)}\ny = Concat <axis = 2> (n0, n1, n2)",
            "its parts are concatenated along another axis than they are split, or along the last",
        ),
        (f"{SPLIT}\n{norms(NORM.replace('-1', '2').replace('w{0}', 'table'))}\n{JOIN}", "it normalizes several axes"),
    ],
)
def test_what_is_not_fused_says_why(tmp_path: Path, body: str, why: str) -> None:
    table = f"flat = Constant <value_floats = {[1.0] * 20}> ()\nsizes = Constant <value_ints = [5, 4]> ()\n"
    _, made = fused(f"{table}table = Reshape (flat, sizes)\n{body}", tmp_path)
    assert [(outcome.operator, outcome.kind, outcome.why) for outcome in made.outcomes] == [(None, "norm", why)]


@pytest.mark.parametrize(
    "join",
    [
        "y = Concat <axis = 1> (n1, n0, n2)",
        "k = Concat <axis = 1> (n0, n1, n2)  z = Concat <axis = 1> (n2, n1, n0)  y = Add (k, z)",
    ],
)
def test_other_joins_are_none(tmp_path: Path, join: str) -> None:
    _, made = fused(f"{SPLIT}\n{norms(NORM)}\n{join}", tmp_path)
    assert made.outcomes == ()


def test_their_heads_are_sharded(tmp_path: Path) -> None:
    b = Block()
    x = b.data("x", (2, 5, 16), ["batch", "length", 16])
    heads = b.op("Reshape", b.op("MatMul", x, b.w("A", 16, 24)), b.ints(0, 0, 6, 4))
    parts = b.ops("Split", b.op("Transpose", heads, perm=[0, 2, 1, 3]), b.ints(*[1] * 6), outputs=6, axis=1)
    normed = [b.op("LayerNormalization", part, b.w(f"scale{n}", 4)) for n, part in enumerate(parts)]
    joined = b.op("Transpose", b.op("Concat", *normed, axis=1), perm=[0, 2, 1, 3])
    b.give(b.op("MatMul", b.op("Reshape", joined, b.ints(0, 0, 24)), b.w("B", 24, 16)), shape=["batch", "length", 16])
    check_split(b, tmp_path, ["A", "B"])
