"""A norm with a computed scale and shift (adaLN) becomes one operator with the same numbers."""

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
from tests.helpers.written_attention import operators

SIZE = 8
PLAIN = f"ones = Constant <value_floats = {[1.0] * SIZE}> ()  normal = LayerNormalization <epsilon = 1e-6> (x, ones)"
ZEROS = f"""ones = Constant <value_floats = {[1.0] * SIZE}> ()  zeros = Constant <value_floats = {[0.0] * SIZE}> ()
    normal = LayerNormalization (x, ones, zeros)"""
OWN = f"own = Constant <value_floats = {[2.0] * SIZE}> ()  normal = LayerNormalization (x, own)"
MORE = "one = Constant <value_float = 1.0> ()  more = Add (scale, one)"
MODULATED = "times = Mul (normal, more)  y = Add (times, shift)"


def written(body: str, rows: str = "batch, 1") -> onnx.ModelProto:
    """A model that normalizes x [batch, length, 8], with this many rows of scale and shift."""
    row = f"float[{rows + ', ' if rows else ''}{SIZE}]"
    signature = f"g (float[batch, length, {SIZE}] x, {row} scale, {row} shift) => (float[batch, length, {SIZE}] y)"
    return onnx.parser.parse_model(f'<ir_version: 8, opset_import: ["" : 18]> {signature} {{ {body} }}')


def rows_of(model: onnx.ModelProto, batch: int, length: int) -> dict[str, tuple[int, ...]]:
    sizes = {"batch": batch, "length": length}
    return {
        value.name: tuple(sizes.get(dim.dim_param, dim.dim_value) for dim in value.type.tensor_type.shape.dim)
        for value in model.graph.input
    }


def fused(model: onnx.ModelProto, folder: Path) -> Fused:
    path = folder / "model.onnx"
    onnx.save(model, path)
    analysis = analyze(path, AskedShapes(rows_of(model, 2, 5)), 1)
    return fuse(analysis.graph, analysis.shapes, analysis.costs.bound, ANY)


BOTH = f"""own = Constant <value_floats = {[n / 4 for n in range(SIZE)]}> ()
    bias = Constant <value_floats = {[1.0 - n / 4 for n in range(SIZE)]}> ()
    normal = LayerNormalization (x, own, bias)"""


WRITTEN_OUT = """last = Constant <value_ints = [-1]> ()  middle = ReduceMean (x, last)  centered = Sub (x, middle)
    two = Constant <value_float = 2.0> ()  squares = Pow (centered, two)  variance = ReduceMean (squares, last)
    small = Constant <value_float = 1e-6> ()  total = Add (variance, small)  root = Sqrt (total)
    normal = Div (centered, root)"""
NORMS = {"plain": PLAIN, "zeros": ZEROS, "weights": OWN, "weights and a bias": BOTH, "written out": WRITTEN_OUT}


@pytest.mark.parametrize("norm", NORMS.values(), ids=NORMS)
@pytest.mark.parametrize("modulated", [MODULATED, "times = Mul (more, normal)  y = Add (shift, times)"])
@pytest.mark.parametrize("rows", ["batch, 1", "1, 1", ""])
def test_each_form_gives_the_same(tmp_path: Path, norm: str, modulated: str, rows: str) -> None:
    model = written(f"{norm} {MORE} {modulated}", rows)
    made = fused(model, tmp_path)
    kind = "norm" if norm is WRITTEN_OUT else "modulation"
    assert [(outcome.kind, outcome.operator) for outcome in made.outcomes] == [(kind, "LayerNormalization")]
    multiplied = {OWN: 1, BOTH: 2}.get(norm, 0)  # of one row for each image
    assert operators(made.graph.graph).count("Mul") == multiplied
    assert operators(made.graph.graph).count("LayerNormalization") == 1
    random = np.random.default_rng(0)
    inputs = {name: random.standard_normal(shape, np.float32) for name, shape in rows_of(model, 3, 4).items()}
    np.testing.assert_allclose(run(ir.to_proto(made.graph.model), inputs), run(model, inputs), rtol=0, atol=2e-6)


HALF_NORM = PLAIN.replace("(x, ones)", "(wide_x, ones)").replace("normal =", "wide_normal =")
IN_HALVES = {
    "the norm": f"""wide_x = Cast <to = 1> (x) {HALF_NORM} normal = Cast <to = 10> (wide_normal)
        one = Constant <value_float = 1.0> ()  half = Cast <to = 10> (one)  more = Add (scale, half) {MODULATED}""",
    "all of it": f"""wide_x = Cast <to = 1> (x) {PLAIN.replace("(x, ones)", "(wide_x, ones)")}
        wide_scale = Cast <to = 1> (scale)  wide_shift = Cast <to = 1> (shift)
        {MORE.replace("(scale", "(wide_scale")} {MODULATED.replace("y =", "wide_y =").replace("shift", "wide_shift")}
        y = Cast <to = 10> (wide_y)""",
}


@pytest.mark.parametrize("form", IN_HALVES)
def test_single_precision_between_casts_from_and_to_halves(tmp_path: Path, form: str) -> None:
    """As diffusers' FP32LayerNorm: the operator computes in single precision anyway, and reads and writes halves."""
    text = onnx.printer.to_text(written(IN_HALVES[form])).replace("float[", "float16[")
    model = onnx.parser.parse_model(text)
    made = fused(model, tmp_path)
    assert [(outcome.kind, outcome.operator) for outcome in made.outcomes] == [("modulation", "LayerNormalization")]
    names = operators(made.graph.graph)
    assert "Mul" not in names and names[-1] == "LayerNormalization"
    random = np.random.default_rng(0)
    inputs = {n: random.standard_normal(shape).astype(np.float16) for n, shape in rows_of(model, 3, 4).items()}
    np.testing.assert_allclose(run(ir.to_proto(made.graph.model), inputs), run(model, inputs), rtol=4e-3, atol=4e-3)


ODD = [
    (f"{PLAIN} {MORE} {MODULATED}", "batch, length", "its scale and shift are not one row for each batch entry"),
]


@pytest.mark.parametrize(("body", "rows", "why"), ODD, ids=[why for *_, why in ODD])
def test_what_is_not_fused_says_why(tmp_path: Path, body: str, rows: str, why: str) -> None:
    (outcome,) = fused(written(body, rows), tmp_path).outcomes
    assert (outcome.operator, outcome.kind, outcome.why) == (None, "modulation", why)


@pytest.mark.parametrize(
    "body",
    [
        f"{PLAIN} {MORE} times = Mul (normal, more)  y = Sub (times, shift)",
        f"{PLAIN} {MORE} times = Mul (normal, more)  both = Add (times, shift)  y = Add (both, normal)",
    ],
)
def test_other_uses_of_a_norm_are_no_modulation(tmp_path: Path, body: str) -> None:
    assert fused(written(body), tmp_path).outcomes == ()
