"""A decomposed RMSNorm becomes one operator with the same numbers."""

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

HEAD = '<ir_version: 8, opset_import: ["" : 18]>'
POWER = "two = Constant <value_float = 2.0> ()  squares = Pow (x, two)"
SQUARE = "squares = Mul (x, x)"
MEAN = """
    last = Constant <value_ints = [-1]> ()  mean = ReduceMean (squares, last)
    small = Constant <value_float = 1e-5> ()  total = Add (mean, small)
"""
RECIPROCAL = "root = Sqrt (total)  turned = Reciprocal (root)  normal = Mul (x, turned)"
POWERED = "half = Constant <value_float = -0.5> ()  turned = Pow (total, half)  normal = Mul (turned, x)"
DIVIDED = "root = Sqrt (total)  normal = Div (x, root)"
WEIGHTED = "y = Mul (weights, normal)"
BY_ROWS = "axes = Constant <value_ints = [0, 1]> ()  row = Unsqueeze (weights, axes)  y = Mul (normal, row)"


def written(body: str, dtype: str = "float", weights: str = "float") -> onnx.ModelProto:
    """A model that normalizes its input, with weights of 8 numbers."""
    signature = f"norm ({dtype}[batch, length, 8] data, {weights}[8] weights) => ({dtype}[batch, length, 8] y)"
    cast = "x = Identity (data)" if dtype == "float" else "x = Cast <to = 1> (data)"
    return onnx.parser.parse_model(f"{HEAD} {signature} {{ {cast} {body} }}")


def fused(model: onnx.ModelProto, folder: Path) -> Fused:
    path = folder / "model.onnx"
    onnx.save(model, path)
    analysis = analyze(path, AskedShapes({"data": (2, 3, 8), "weights": (8,)}), 1)
    return fuse(analysis.graph, analysis.shapes, analysis.costs.bound, ANY)


def check(
    model: onnx.ModelProto, folder: Path, tolerance: float, operator: str = "SimplifiedLayerNormalization"
) -> None:
    made = fused(model, folder)
    assert [(outcome.kind, outcome.operator) for outcome in made.outcomes] == [("norm", operator)]
    assert "ReduceMean" not in operators(made.graph.graph)
    types = {value.name: value.type.tensor_type.elem_type for value in model.graph.input}
    random = np.random.default_rng(0)
    inputs = {
        name: random.standard_normal(shape).astype(onnx.helper.tensor_dtype_to_np_dtype(types[name]))
        for name, shape in {"data": (4, 5, 8), "weights": (8,)}.items()
    }
    np.testing.assert_allclose(run(ir.to_proto(made.graph.model), inputs), run(model, inputs), rtol=0, atol=tolerance)


@pytest.mark.parametrize("square", [POWER, SQUARE])
@pytest.mark.parametrize("divided", [RECIPROCAL, POWERED, DIVIDED])
@pytest.mark.parametrize("weighted", [WEIGHTED, BY_ROWS])
def test_each_form_gives_the_same(tmp_path: Path, square: str, divided: str, weighted: str) -> None:
    check(written(square + MEAN + divided + weighted), tmp_path, 2e-6)


def test_halves_in_single_precision_between_casts(tmp_path: Path) -> None:
    """With half-precision weights after the cast back, or single-precision ones before it."""
    after = "narrow = Cast <to = 10> (normal)  y = Mul (weights, narrow)"
    check(written(POWER + MEAN + RECIPROCAL + after, "float16", "float16"), tmp_path, 4e-3)
    before = "wide = Mul (normal, weights)  y = Cast <to = 10> (wide)"
    check(written(POWER + MEAN + RECIPROCAL + before, "float16"), tmp_path, 4e-3)
    number = f"weight = Constant <value_floats = [1.5]> ()  {before.replace('weights', 'weight')}"
    check(written(POWER + MEAN + RECIPROCAL + number, "float16"), tmp_path, 4e-3)


CENTERED = """
    middle = ReduceMean <axes = [-1]> (wide)  x = Sub (wide, middle)
    two = Constant <value_float = 2.0> ()  squares = Pow (x, two)  mean = ReduceMean <axes = [-1]> (squares)
    small = Constant <value_float = 1e-5> ()  total = Add (mean, small)
"""


GIVEN = "given = Cast <to = 1> (weights)"


def layer_norm(body: str, dtype: str = "float", weights: str = "float") -> onnx.ModelProto:
    """As exporters write it below opset 17."""
    signature = f"norm ({dtype}[batch, length, 8] data, {weights}[8] weights) => ({dtype}[batch, length, 8] y)"
    cast = "wide = Identity (data)" if dtype == "float" else "wide = Cast <to = 1> (data)"
    head = HEAD.replace("18", "14")
    return onnx.parser.parse_model(f"{head} {signature} {{ {cast} {CENTERED} {body} }}")


@pytest.mark.parametrize("divided", [RECIPROCAL, POWERED, DIVIDED])
@pytest.mark.parametrize(
    ("behind", "left"),
    [
        ("w = Mul (normal, weights)  y = Add (w, weights)", set()),
        ("w = Mul (weights, normal)  y = Add (w, data)", {"Add"}),
        (f"{BY_ROWS.replace('y =', 'w =')}  y = Add (row, w)", set()),
        (WEIGHTED, set()),
        ("y = Add (normal, weights)", {"Add"}),
    ],
    ids=["biased", "a residual", "by rows", "weighted", "without weights"],
)
def test_one_that_subtracts_the_mean_is_a_layer_norm(tmp_path: Path, divided: str, behind: str, left: set[str]) -> None:
    model = layer_norm(divided + behind)
    check(model, tmp_path, 2e-6, "LayerNormalization")
    assert {*operators(fused(model, tmp_path).graph.graph)} - {"LayerNormalization"} == left


MOMENTS = """avg = ReduceMean <axes = [2]> (data)  apart = Sub (data, avg)  squares = Mul (apart, apart)
    variance = ReduceMean <axes = [2]> (squares)"""
POOLED = MOMENTS.replace("ReduceMean <axes = [2]>", "GlobalAveragePool")
FAST = """powers = Mul (data, data)  square = ReduceMean <axes = [2]> (powers)  avg = ReduceMean <axes = [2]> (data)
    apart = Sub (data, avg)  of_avg = Mul (avg, avg)  variance = Sub (square, of_avg)"""
BOUNDED = FAST.replace("variance =", "free =") + " zero = Constant <value_float = 0.0> ()  variance = Max (free, zero)"
DROPPED = """powers = Mul (data, data)  square = ReduceMean <axes = [2], keepdims = 0> (powers)
    flat = ReduceMean <axes = [2], keepdims = 0> (data)  of_avg = Mul (flat, flat)  free = Sub (square, of_avg)
    last = Constant <value_ints = [2]> ()  variance = Unsqueeze (free, last)  avg = Unsqueeze (flat, last)
    apart = Sub (data, avg)"""
SUMS = """again = ReduceMean <axes = [2]> (data)  n = Constant <value_float = 8.0> ()
    sum = ReduceSum <keepdims = 0> (data, last)  kept = Unsqueeze (sum, last)  avg = Div (kept, n)
    apart = Sub (data, again)  also = Sub (data, avg)
    squares = ReduceSumSquare <axes = [2]> (also)  variance = Div (squares, n)"""
EPSILON = "small = Constant <value_float = 1e-5> ()  total = Add (variance, small)  root = Sqrt (total)"
SCALED = "one_over = Reciprocal (root)  factor = Mul (one_over, weights)"
SHIFTED = "w = Mul (data, factor)  v = Mul (avg, factor)  rest = Sub (weights, v)  y = Add (w, rest)"
NEGATED = "minus = Neg (avg)  v = Mul (minus, factor)  w = Mul (data, factor)"
ORDERS = {
    "TensorFlow": (MOMENTS, f"{SCALED} {SHIFTED}", set()),
    "the mean of the last of three axes as a pool": (POOLED, f"{SCALED} {SHIFTED}", set()),
    "Keras": (POOLED, f"{SCALED} {NEGATED} rest = Add (v, weights)  y = Add (rest, w)", set()),
    "Keras without a bias": (POOLED, f"{SCALED} {NEGATED} y = Add (w, v)", set()),
    "a product that is negated": (
        MOMENTS,
        f"{SCALED} w = Mul (data, factor)  v = Mul (avg, factor)  minus = Neg (v)  y = Add (w, minus)",
        set(),
    ),
    "Flax": (FAST, f"{SCALED} w = Mul (apart, factor)  y = Add (w, weights)", set()),
    "Flax, with a bound": (BOUNDED, "normal = Div (apart, root)  y = Mul (normal, weights)", set()),
    "a bound by a Clip": (
        BOUNDED.replace("Max (free, zero)", "Clip (free, zero)"),
        "normal = Div (apart, root)  y = Mul (normal, weights)",
        set(),
    ),
    "a bound by a Relu": (
        BOUNDED.replace("Max (free, zero)", "Relu (free)"),
        "normal = Div (apart, root)  y = Mul (normal, weights)",
        set(),
    ),
    "JAX": (DROPPED, f"{SCALED} w = Mul (factor, apart)  y = Add (w, weights)", set()),
    "sums of squares": (
        f"last = Constant <value_ints = [2]> ()  {SUMS}",
        "normal = Div (apart, root)  w = Mul (normal, weights)  y = Add (w, weights)",
        set(),
    ),
    "weights before the division": (
        MOMENTS,
        "w = Mul (weights, apart)  v = Div (w, root)  y = Add (v, weights)",
        set(),
    ),
    "weights before the reciprocal": (
        MOMENTS,
        "w = Mul (apart, weights)  r = Reciprocal (root)  y = Mul (w, r)",
        set(),
    ),
    "an epsilon that is zero in half precision": (
        MOMENTS,
        "none = Constant <value_float = 0.0> ()  sum = Add (variance, none)  own = Sqrt (sum)  y = Div (apart, own)",
        set(),
    ),
    "a gate": (MOMENTS, "one_over = Reciprocal (root)  w = Mul (apart, one_over)  y = Mul (data, w)", {"Mul"}),
}


@pytest.mark.parametrize("order", ORDERS)
def test_a_layer_norm_in_another_order(tmp_path: Path, order: str) -> None:
    moments, body, left = ORDERS[order]
    signature = "norm (float[batch, length, 8] data, float[8] weights) => (float[batch, length, 8] y)"
    head = HEAD.replace("18", "14")
    model = onnx.parser.parse_model(f"{head} {signature} {{ {moments} {EPSILON} {body} }}")
    check(model, tmp_path, 4e-6, "LayerNormalization")
    assert {*operators(fused(model, tmp_path).graph.graph)} - {"LayerNormalization"} == left


LENGTH = "size = ReduceL2 <axes = [-1]> (x)"
BOUND = "least = Constant <value_float = 1e-12> ()  bound = Clip (size, least)"
SPREAD = "shape = Shape (x)  lengths = Expand (bound, shape)  apart = Div (x, lengths)"
BY_LENGTH = {
    "of one": f"{LENGTH} y = Div (x, size)",
    "of the root of the size": f"{LENGTH} {BOUND} {SPREAD} many = Mul (apart, root8)  y = Mul (many, weights)",
    "with weights": f"{LENGTH} {BOUND} {SPREAD} y = Mul (weights, apart)",
    "of a mean": f"{LENGTH} mean = Div (size, root8)  {BOUND.replace('size, ', 'mean, ')} y = Div (x, bound)",
    "of a sum": f"{LENGTH} small = Constant <value_float = 1e-8> ()  bound = Add (size, small)  y = Div (x, bound)",
    "bounded by what is zero in halves": f"{LENGTH} {BOUND.replace('1e-12', '0.0')} y = Div (x, bound)",
    "by a maximum": f"{LENGTH} {BOUND.replace('Clip (size, least)', 'Max (least, size)')} y = Div (x, bound)",
}


@pytest.mark.parametrize("form", BY_LENGTH)
def test_a_value_divided_by_its_length_is_a_norm(tmp_path: Path, form: str) -> None:
    """As torch's normalize, which norms of video autoencoders and cosine attention have."""
    root = "root8 = Constant <value_float = 2.828427> ()"
    head = HEAD.replace("18", "17")
    signature = "norm (float[batch, length, 8] data, float[8] weights) => (float[batch, length, 8] y)"
    model = onnx.parser.parse_model(f"{head} {signature} {{ x = Identity (data)  {root} {BY_LENGTH[form]} }}")
    check(model, tmp_path, 2e-6)
    names = operators(fused(model, tmp_path).graph.graph)
    assert ("Div" in names, names.count("Mul")) == (False, int(form == "with weights"))


@pytest.mark.parametrize("operator", ["Max", "Add"])
@pytest.mark.parametrize("bound", ["Constant <value_float = 0.5> ()", "Identity (size)"])
def test_a_length_with_another_bound_is_no_norm(tmp_path: Path, bound: str, operator: str) -> None:
    body = f"x = Identity (data)  {LENGTH} least = {bound}  bound = {operator} (least, size)  y = Div (x, bound)"
    signature = "norm (float[batch, length, 8] data, float[8] weights) => (float[batch, length, 8] y)"
    model = onnx.parser.parse_model(f"{HEAD.replace('18', '17')} {signature} {{ {body} }}")
    assert fused(model, tmp_path).outcomes == ()


@pytest.mark.parametrize("width", [4, 1], ids=["along the channels", "weights of one number"])
@pytest.mark.parametrize("divided", [DIVIDED, POWERED])
def test_a_norm_along_another_axis(tmp_path: Path, divided: str, width: int) -> None:
    """As along the channels of an image. The Transpose before it, and the one behind, cancel others."""
    row = f"float[{width}, 1] row = {{{', '.join('1234'[:width])}}}"
    channels = f"""image = Transpose <perm = [0, 2, 1]> (stem)  {CENTERED.replace("-1", "1").replace("wide", "image")}
        {divided}  w = Mul (normal, row)  behind = Transpose <perm = [0, 2, 1]> (w)  y = Add (behind, weights)"""
    signature = f"norm (float[batch, 8, 4] data, float[4] weights) => (float[batch, 8, 4] y) <{row}>"
    body = f"{{ stem = Neg (data) {channels} }}"
    model = onnx.parser.parse_model(f"{HEAD.replace('18', '14')} {signature} {body}")
    path = tmp_path / "model.onnx"
    onnx.save(model, path)
    shapes = {"data": (2, 8, 4), "weights": (4,)}
    analysis = analyze(path, AskedShapes(shapes), 1)
    made = fuse(analysis.graph, analysis.shapes, analysis.costs.bound, ANY)
    assert [(outcome.kind, outcome.operator) for outcome in made.outcomes] == [("norm", "LayerNormalization")]
    random = np.random.default_rng(0)
    inputs = {name: random.standard_normal(shape).astype(np.float32) for name, shape in shapes.items()}
    np.testing.assert_allclose(run(ir.to_proto(made.graph.model), inputs), run(model, inputs), rtol=0, atol=2e-6)


@pytest.mark.parametrize("channels", [16, 4])
def test_a_norm_along_few_channels_stays(tmp_path: Path, channels: int) -> None:
    """Transposes would take longer than fusing saves."""
    signature = f"norm (float[batch, {channels}, 8] data) => (float[batch, {channels}, 8] y)"
    body = f"{CENTERED.replace('-1', '1').replace('wide', 'data')} {DIVIDED}  y = Neg (normal)"
    model = onnx.parser.parse_model(f"{HEAD.replace('18', '14')} {signature} {{ {body} }}")
    path = tmp_path / "model.onnx"
    onnx.save(model, path)
    analysis = analyze(path, AskedShapes({"data": (2, channels, 8)}), 1)
    before = operators(analysis.graph.graph)
    made = fuse(analysis.graph, analysis.shapes, analysis.costs.bound, ANY)
    (outcome,) = made.outcomes
    if channels == 16:
        assert operators(made.graph.graph) == ["Transpose", "LayerNormalization", "Transpose", "Neg"]
    else:
        assert "too short for transposes" in (outcome.why or "") and operators(made.graph.graph) == before


WIDENED = "x = Cast <to = 1> (less)  two ="


@pytest.mark.parametrize(
    "behind",
    [
        "narrow = Cast <to = 10> (normal)  w = Mul (narrow, weights)  y = Add (w, weights)",
        f"{GIVEN}  w = Mul (normal, given)  narrow = Cast <to = 10> (w)  y = Add (narrow, weights)",
        f"{GIVEN}  w = Mul (normal, given)  b = Add (w, given)  y = Cast <to = 10> (b)",
    ],
    ids=["at once", "before the bias", "behind the bias"],
)
def test_a_layer_norm_of_halves_is_narrowed(tmp_path: Path, behind: str) -> None:
    model = layer_norm(DIVIDED + behind, "float16", "float16")
    check(model, tmp_path, 8e-3, "LayerNormalization")
    (norm,) = (node for node in fused(model, tmp_path).graph.nodes if node.op_type == "LayerNormalization")
    assert [value.dtype for value in norm.inputs if value is not None] == [ir.DataType.FLOAT16] * 3


@pytest.mark.parametrize("narrow", ["Cast <to = 10> (normal)", "Identity (normal)"], ids=["narrowed", "wide"])
def test_halves_that_are_centered_before_they_are_cast(tmp_path: Path, narrow: str) -> None:
    """As torch's older exporter writes a LayerNorm in half precision. A wide result keeps the wide division."""
    to, kind = ("float16", "LayerNormalization") if "Cast" in narrow else ("float", "SimplifiedLayerNormalization")
    centered = CENTERED.replace("wide", "data").replace("x = Sub", "less = Sub").replace("two =", WIDENED)
    signature = f"norm (float16[batch, length, 8] data, {to}[8] weights) => ({to}[batch, length, 8] y)"
    body = f"{centered} {DIVIDED} narrow = {narrow}  w = Mul (narrow, weights)  y = Add (w, weights)"
    model = onnx.parser.parse_model(f"{HEAD.replace('18', '14')} {signature} {{ {body} }}")
    made = fused(model, tmp_path)
    assert [(outcome.kind, outcome.operator) for outcome in made.outcomes] == [("norm", kind)]
    random = np.random.default_rng(0)
    inputs = {
        "data": random.standard_normal((4, 5, 8)).astype(np.float16),
        "weights": random.standard_normal(8).astype(np.float16 if to == "float16" else np.float32),
    }
    np.testing.assert_allclose(run(ir.to_proto(made.graph.model), inputs), run(model, inputs), rtol=0, atol=8e-3)


def of_halves(weights: str) -> onnx.ModelProto:
    """A LayerNorm in single precision between casts."""
    body = f"""wide = Cast <to = 1> (x)  {weights}  wide_y = LayerNormalization <epsilon = 1e-3> (wide, scale, bias)
        y = Cast <to = 10> (wide_y)"""
    signature = "norm (float16[batch, length, 8] x, float16[8] given) => (float16[batch, length, 8] y)"
    return onnx.parser.parse_model(f"{HEAD} {signature} {{ {body} }}")


BIAS = "bias = Cast <to = 1> (given)"


@pytest.mark.parametrize("scale", [1.5, 0.1], ids=["a half", "no half"])
def test_a_norm_between_casts_from_and_to_halves(tmp_path: Path, scale: float) -> None:
    """It becomes one of halves if its weights are halves: a cast of them, or constants that halves have."""
    model = of_halves(f"scale = Constant <value_floats = {[scale] * 8}> ()  {BIAS}")
    onnx.save(model, tmp_path / "model.onnx")
    shapes = {"x": (2, 5, 8), "given": (8,)}
    analysis = analyze(tmp_path / "model.onnx", AskedShapes(shapes), 1)
    made = fuse(analysis.graph, analysis.shapes, analysis.costs.bound, ANY)
    fused_norms = [("norm", "LayerNormalization")] if scale == 1.5 else []
    assert [(outcome.kind, outcome.operator) for outcome in made.outcomes] == fused_norms
    assert ("Cast" in operators(made.graph.graph)) == (scale != 1.5)
    random = np.random.default_rng(0)
    inputs = {name: random.standard_normal(shape).astype(np.float16) for name, shape in shapes.items()}
    np.testing.assert_allclose(run(ir.to_proto(made.graph.model), inputs), run(model, inputs), rtol=4e-3, atol=4e-3)


@pytest.mark.parametrize("divided", [RECIPROCAL, DIVIDED])
@pytest.mark.parametrize("body", ["y = Mul (normal, data)", "y = Neg (normal)", "y = Mul (normal, normal)"])
def test_one_without_weights_has_ones(tmp_path: Path, divided: str, body: str) -> None:
    check(written(POWER + MEAN + divided + body), tmp_path, 2e-6)


def test_one_without_weights_in_halves(tmp_path: Path) -> None:
    """As in a norm by groups of heads, whose weights are for all groups together."""
    groups = "sizes = Constant <value_ints = [0, -1, 4, 2]> ()  x = Reshape (wide, sizes)"
    behind = """narrow = Cast <to = 10> (normal)  all = Constant <value_ints = [0, -1, 8]> ()
        row = Reshape (narrow, all)  y = Mul (weights, row)"""
    body = POWER + MEAN + RECIPROCAL + behind
    cast = "wide = Cast <to = 1> (data)"
    signature = "norm (float16[batch, length, 8] data, float16[8] weights) => (float16[batch, length, 8] y)"
    check(onnx.parser.parse_model(f"{HEAD} {signature} {{ {cast} {groups} {body} }}"), tmp_path, 4e-3)


def test_what_is_not_fused_says_why(tmp_path: Path) -> None:
    body = POWER + MEAN.replace("ReduceMean", "ReduceMean <keepdims = 0>") + RECIPROCAL + WEIGHTED
    (outcome,) = fused(written(body), tmp_path).outcomes
    assert (outcome.operator, outcome.kind) == (None, "norm")
    assert outcome.why == "its mean drops the axis (keepdims=0)"


BY_HEADS = """four = Constant <value_ints = [0, 0, 2, 4]> ()  apart = Reshape (data, four)
    x = Transpose <perm = [0, 2, 1, 3]> (apart)"""
TURNED = {
    "written out": POWER + MEAN + RECIPROCAL + "norm = Mul (normal, row)",
    "an operator": "norm = SimplifiedLayerNormalization <axis = -1, epsilon = 1e-5> (x, row)",
}


@pytest.mark.parametrize("form", TURNED)
def test_a_norm_comes_before_a_transpose(tmp_path: Path, form: str) -> None:
    """So that the transpose of Gemma 3's queries and the one after their rotation cancel."""
    back = "turned_back = Transpose <perm = [0, 2, 1, 3]> (norm)  flat = Constant <value_ints = [0, 0, 8]> ()"
    row = "ones = Constant <value_floats = [1.0, 2.0, 3.0, 4.0]> ()  row = Identity (ones)"
    signature = "norm (float[batch, length, 8] data, float[8] weights) => (float[batch, length, 8] y)"
    body = f"{BY_HEADS} {row} {TURNED[form]} {back} made = Reshape (turned_back, flat)  y = Add (made, weights)"
    model = onnx.parser.parse_model(f"{HEAD} {signature} {{ {body} }}")
    made = fused(model, tmp_path)
    assert [(outcome.kind, outcome.operator) for outcome in made.outcomes] == [("norm", "SimplifiedLayerNormalization")]
    names = operators(made.graph.graph)
    assert names.index("SimplifiedLayerNormalization") < names.index("Transpose")
    random = np.random.default_rng(0)
    inputs = {"data": random.random((4, 5, 8), np.float32), "weights": random.random(8, np.float32)}
    np.testing.assert_allclose(run(ir.to_proto(made.graph.model), inputs), run(model, inputs), rtol=0, atol=2e-6)


def test_a_deviation_is_no_norm(tmp_path: Path) -> None:
    """The root of a mean square that does not divide the data it comes from."""
    body = POWER + MEAN + "root = Sqrt (total)  y = Add (x, root)"
    assert fused(written(body), tmp_path).outcomes == ()


def test_shapes_that_depend_on_data_stay_known(tmp_path: Path) -> None:
    """As far as they were: row mode needs the columns of products over experts."""
    body = POWER + MEAN + RECIPROCAL + WEIGHTED + " places = NonZero (data)"
    results = "float[batch, length, 8] y, int64[3, n] places"
    signature = f"norm (float[batch, length, 8] data, float[8] weights) => ({results})"
    made = fused(onnx.parser.parse_model(f"{HEAD} {signature} {{ x = Identity (data) {body} }}"), tmp_path)
    assert [outcome.operator for outcome in made.outcomes] == ["SimplifiedLayerNormalization"]
    assert "places" in made.bound.unknown and made.bound.shapes["places"] == (3, 1)
