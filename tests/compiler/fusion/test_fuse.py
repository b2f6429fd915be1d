"""Decomposed attention becomes one operator with the same numbers, in each form that exporters write."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import product
from pathlib import Path

import numpy as np
import onnx
import onnx_ir as ir
import pytest

from splitc.compiler import Request, compile_model, plan_model, plan_pipeline
from splitc.compiler.analysis.facts import analyze
from splitc.compiler.fusion.fuse import Fused, Outcome, fuse
from splitc.compiler.inference.shapes import bind_shapes, infer_shapes, read_symbols
from splitc.compiler.normal_form.graph import open_graph
from splitc.compiler.normal_form.plain_forms import use_plain_forms
from splitc.compiler.patterns.kernels import Gains
from splitc.compiler.reading.loading import read_model
from splitc.compiler.request.shapes import AskedShapes, Shape
from splitc.compiler.show.pipeline_page import pipeline_page
from splitc.compiler.show.pipeline_tables import print_pipeline
from splitc.compiler.show.plan_page import plan_chapter
from splitc.compiler.show.plan_tables import check_explained, print_explained, print_plan
from splitc.runtime import Session
from tests.conftest import run_whole, whole_session
from tests.helpers.written_attention import TRUTHS, Form, Size, feeds, operators, write

SIZE = Size()
TYPES = frozenset({ir.DataType.FLOAT, ir.DataType.FLOAT16})
ANY = Gains(TYPES, parts=TYPES, modulations=TYPES)
OTHER = replace(SIZE, batch=3, length=9, all=4)
LAYOUTS = ("merged", "rows", "einsum")
BIASES = ("none", "mask", "row", "learned", "both", "where", "kept")
ODD_FORMS = (
    Form(value_size=6),
    Form(softmax="less"),
    Form(softmax="written"),
    Form(turned=True),
    Form(reads_sizes=True),
)
# Batch and heads as two axes: each scale with each bias, in turns with the keys, repeated heads and guards.
FORMS = [
    Form(scale, bias, ("once", "cache")[(one + other) % 2], groups=1 + (one // 2 + other) % 2, guard=odd, flipped=odd)
    for one, scale in enumerate(("after", "before", "split", "none"))
    for other, (bias, odd) in enumerate(zip(BIASES[:5], (one > 1, one % 2 == 1, one == 0, one == 3, one < 2)))
]
FORMS += [Form(bias=bias, opset=12) for bias in ("mask", "row", "learned", "both")]
FORMS += [
    Form(bias=bias, layout=layout, flipped=number % 2 == 1)
    for number, (layout, bias) in enumerate(product(LAYOUTS, BIASES))
]
FORMS += [Form(bias=bias, flipped=flipped, guard=flipped) for bias, flipped in product(TRUTHS, (False, True))]
# Each oddity with each bias and each layout.
FORMS += [
    replace(form, bias=bias, layout=("heads", "merged", "rows")[(one + other) % 3])
    for (one, form), (other, bias) in product(enumerate(ODD_FORMS), enumerate(("none", "mask", "where")))
]
FORMS += [Form(bias="where", zeroed=True, keys_first=flipped, flipped=flipped) for flipped in (False, True)]
FORMS += [Form(bias=bias, fused_product=True) for bias in ("none", "mask", "where")]
FORMS += [Form("late", bias, softmax="shifted", flipped=bias == "mask") for bias in ("none", "mask")]
FORMS += [Form("after", bias, softmax="filled", flipped=bias == "mask") for bias in ("none", "mask")]
FORMS += [Form(scale, bias, flipped=bias == "mask") for scale in ("computed", "heads") for bias in ("none", "mask")]
FORMS += [Form("computed", layout=layout) for layout in ("merged", "rows", "einsum")]
FORMS += [Form(bias=bias, keys="shared") for bias in ("none", "mask", "learned")]
FORMS += [Form(scale, bias, keys="around") for scale in ("after", "split") for bias in ("none", "mask")]
FORMS += [Form("late", bias, layout=layout) for bias in ("mask", "both", "where") for layout in ("heads", "merged")]


def fused(model: onnx.ModelProto, folder: Path, size: Size, form: Form) -> Fused:
    path = folder / "model.onnx"
    onnx.save(model, path)
    shapes = {name: array.shape for name, array in feeds(form, size).items()}
    graph = open_graph(path, *read_model(path))
    read_symbols(graph.model)
    infer_shapes(graph.model)
    while use_plain_forms(graph.graph):
        infer_shapes(graph.model)
    return fuse(graph, shapes, bind_shapes(graph.model, shapes, defaults=True), ANY)


def run(model: onnx.ModelProto, inputs: dict[str, np.ndarray]) -> np.ndarray:
    return run_each(model, [inputs])[0]


def run_each(model: onnx.ModelProto, inputs: Sequence[dict[str, np.ndarray]]) -> list[np.ndarray]:
    """The model's outputs for each of the inputs."""
    session = whole_session(model.SerializeToString())
    return [np.asarray(session.run(None, each)[0]) for each in inputs]


@pytest.mark.parametrize("number", range(0, len(FORMS)))
def test_every_form_is_fused_and_gives_the_same(tmp_path: Path, number: int) -> None:
    form = FORMS[number]
    blocks = 2 if number % 4 == 0 else 1
    model = write(form, SIZE, blocks, seed=1)
    made = fused(model, tmp_path, SIZE, form)
    assert made.outcomes == tuple(Outcome(outcome.place, "MultiHeadAttention") for outcome in made.outcomes)
    names = operators(made.graph.graph)
    assert names.count("com.microsoft.MultiHeadAttention") == len(made.outcomes) == blocks and "Softmax" not in names
    if form.keys == "around":
        assert "Transpose" not in names
    proto = ir.to_proto(made.graph.model)
    sizes = [SIZE, replace(SIZE, batch=3) if form.bias in ("learned", "both") else OTHER]
    inputs = [feeds(form, size, seed=1) for size in sizes]
    for actual, expected in zip(run_each(proto, inputs), run_each(model, inputs), strict=True):
        np.testing.assert_allclose(actual, expected, rtol=0, atol=2e-6)
    for value in (value for node in made.graph.graph for value in node.outputs):
        assert value.name in made.bound.shapes


ODD = [
    (Form(), {"FLOAT"}, "its scores (queries x keys) are too few for one operator to be faster"),
    (Form(), {"FLOAT"}, "no kernel is faster for heads larger than 7"),
    (Form(dtype=onnx.TensorProto.FLOAT16), {"FLOAT"}, "no fused kernel is faster for its type, FLOAT16"),
    (Form(tanh=True), {"FLOAT"}, "the operator has no softcap (Tanh)"),
    (Form(sinks=True), {"FLOAT"}, "a Slice is between its Softmax and the product with the values"),
    (Form(softmax_axis=2), {"FLOAT"}, "its Softmax may not be along the last axis"),
]


@pytest.mark.parametrize(("form", "types", "why"), ODD, ids=[why for *_, why in ODD])
def test_what_is_not_fused_says_why(tmp_path: Path, form: Form, types: set[str], why: str) -> None:
    path = tmp_path / "model.onnx"
    onnx.save(write(form, SIZE), path)
    analysis = analyze(path, AskedShapes({name: array.shape for name, array in feeds(form, SIZE).items()}), 1)
    least = SIZE.length * SIZE.all + ("too few" in why)
    largest = SIZE.size - ("heads larger" in why)
    gains = Gains(frozenset(ir.DataType[name] for name in types), least, largest_head=largest)
    made = fuse(analysis.graph, analysis.shapes, analysis.costs.bound, gains)
    assert [outcome.why for outcome in made.outcomes] == [why]
    assert "Softmax" in operators(made.graph.graph)


def test_sizes_that_depend_on_data(tmp_path: Path) -> None:
    """Rows picked by a mask, as in a detector."""
    model = onnx.parser.parse_model("""
        <ir_version: 8, opset_import: ["" : 17]>
        picked (float[batch, 4, length, 8] q, bool[all] keep, float[batch, 4, all, 8] x)
            => (float[batch, 4, length, 8] y)
        {
            v = Compress <axis = 2> (x, keep)
            k = Transpose <perm = [0, 1, 3, 2]> (v)
            scores = MatMul (q, k)
            weights = Softmax <axis = -1> (scores)
            y = MatMul (weights, v)
        }
    """)
    onnx.save(model, tmp_path / "model.onnx")
    analysis = analyze(tmp_path / "model.onnx", AskedShapes({"q": (2, 4, 5, 8), "keep": (7,), "x": (2, 4, 7, 8)}), 1)
    (outcome,) = fuse(analysis.graph, analysis.shapes, analysis.costs.bound, ANY).outcomes
    assert outcome.why == "the shapes of its queries, keys and values are not known"


def test_heads_whose_number_depends_on_the_request_are_a_part_of_the_batch(tmp_path: Path) -> None:
    """Windows of an image lie along the head axis. Their number is dynamic, so it can't be an attribute."""
    model = onnx.parser.parse_model("""
        <ir_version: 8, opset_import: ["" : 17]>
        windows (float[batch, count, length, 8] q, float[batch, count, 8, length] k, float[batch, count, length, 8] v)
            => (float[batch, count, length, 8] y)
        { scores = MatMul (q, k)  weights = Softmax <axis = -1> (scores)  y = MatMul (weights, v) }
    """)
    others = {"q": (3, 6, 7, 8), "k": (3, 6, 8, 7), "v": (3, 6, 7, 8)}
    check(model, tmp_path, {"q": (2, 4, 5, 8), "k": (2, 4, 8, 5), "v": (2, 4, 5, 8)}, others)


def test_windows_may_have_masks_of_their_own(tmp_path: Path) -> None:
    """As in Swin: a bias for each head, and a mask for each window, the same for all images."""
    model = onnx.parser.parse_model("""
        <ir_version: 8, opset_import: ["" : 17]>
        windows (float[all, 4, 5, 8] q, float[all, 4, 8, 5] k, float[all, 4, 5, 8] v, float[1, 3, 1, 5, 5] mask,
                 float[1, 4, 5, 5] bias) => (float[all, 4, 5, 8] y)
        <int64[5] divided = {-1, 3, 4, 5, 5}, int64[4] merged = {-1, 4, 5, 5}>
        {
            scores = MatMul (q, k)
            biased = Add (scores, bias)
            windows = Reshape (biased, divided)
            masked = Add (windows, mask)
            again = Reshape (masked, merged)
            weights = Softmax <axis = -1> (again)
            y = MatMul (weights, v)
        }
    """)
    shapes = {"q": (6, 4, 5, 8), "k": (6, 4, 8, 5), "v": (6, 4, 5, 8), "mask": (1, 3, 1, 5, 5), "bias": (1, 4, 5, 5)}
    check(model, tmp_path, shapes, {**shapes, "q": (9, 4, 5, 8), "k": (9, 4, 8, 5), "v": (9, 4, 5, 8)})


def test_bias_may_have_batch_and_heads_as_one_axis(tmp_path: Path) -> None:
    """As in Bloom's ALiBi."""
    model = onnx.parser.parse_model("""
        <ir_version: 8, opset_import: ["" : 17]>
        merged (float[batch, 4, 5, 8] q, float[batch, 4, 8, 5] k, float[batch, 4, 5, 8] v, float[all, 1, 5] bias)
            => (float[batch, 4, 5, 8] y)
        <int64[3] rows = {-1, 5, 8}, int64[3] columns = {-1, 8, 5}, int64[4] divided = {-1, 4, 5, 8}>
        {
            queries = Reshape (q, rows)
            keys = Reshape (k, columns)
            values = Reshape (v, rows)
            scores = MatMul (queries, keys)
            biased = Add (scores, bias)
            weights = Softmax <axis = -1> (biased)
            made = MatMul (weights, values)
            y = Reshape (made, divided)
        }
    """)
    shapes = {"q": (2, 4, 5, 8), "k": (2, 4, 8, 5), "v": (2, 4, 5, 8), "bias": (8, 1, 5)}
    check(model, tmp_path, shapes, {"q": (3, 4, 5, 8), "k": (3, 4, 8, 5), "v": (3, 4, 5, 8), "bias": (12, 1, 5)})


def test_heads_that_were_moved_to_the_front_take_no_batch(tmp_path: Path) -> None:
    """And they are not moved again."""
    model = onnx.parser.parse_model("""
        <ir_version: 8, opset_import: ["" : 17]>
        packed (float[length, 4, 8] q, float[length, 4, 8] k, float[length, 4, 8] v, float[1, length, length] mask)
            => (float[length, 4, 8] y)
        {
            queries = Transpose <perm = [1, 0, 2]> (q)
            keys = Transpose <perm = [1, 2, 0]> (k)
            values = Transpose <perm = [1, 0, 2]> (v)
            scores = MatMul (queries, keys)
            masked = Add (scores, mask)
            weights = Softmax <axis = -1> (masked)
            made = MatMul (weights, values)
            rows = Transpose <perm = [1, 0, 2]> (made)
            y = Add (rows, q)
        }
    """)
    names = check(model, tmp_path, {"q": (5, 4, 8), "k": (5, 4, 8), "v": (5, 4, 8), "mask": (1, 5, 5)})
    assert "Transpose" not in names


def test_sides_of_a_picture_may_have_to_be_even(tmp_path: Path) -> None:
    """Then no side can be a prime; other sizes tell the axes apart too."""
    model = onnx.parser.parse_model("""
        <ir_version: 8, opset_import: ["" : 17]>
        pictures (float[batch, 8, height, width] x) => (float[batch, 8, height, width] y)
        <int64[4] heads = {0, 2, 4, -1}, float[4] scales = {1.0, 1.0, 2.0, 2.0}>
        {
            low = AveragePool <kernel_shape = [2, 2], strides = [2, 2]> (x)
            keys = Reshape (low, heads)
            rows = Transpose <perm = [0, 1, 3, 2]> (keys)
            scores = MatMul (rows, keys)
            weights = Softmax <axis = -1> (scores)
            made = MatMul (weights, rows)
            back = Transpose <perm = [0, 1, 3, 2]> (made)
            shape = Shape (low)
            picture = Reshape (back, shape)
            up = Resize <mode = "nearest"> (picture, , scales)
            y = Add (x, up)
        }
    """)
    check(model, tmp_path, {"x": (2, 8, 16, 24)}, {"x": (1, 8, 10, 6)})


def test_caches_may_have_symbols_of_their_own_and_be_empty(tmp_path: Path) -> None:
    """Planned for a prompt, with the symbols that torch's exporter writes if axes have no given names."""
    model = onnx.parser.parse_model("""
        <ir_version: 8, opset_import: ["" : 17]>
        prompt (float[b, 4, l, 8] q, float[b, 4, l, 8] k, float[b, 4, l, 8] v, float[b, 1, l, t] mask,
                float[b, 4, s1, 8] past_keys, float[b, 4, s2, 8] past_values) => (float[b, 4, l, 8] y)
        {
            keys = Concat <axis = 2> (past_keys, k)
            values = Concat <axis = 2> (past_values, v)
            turned = Transpose <perm = [0, 1, 3, 2]> (keys)
            scores = MatMul (q, turned)
            masked = Add (scores, mask)
            weights = Softmax <axis = -1> (masked)
            y = MatMul (weights, values)
        }
    """)
    news: dict[str, Shape] = dict.fromkeys("qkv", (2, 4, 5, 8))
    shapes: dict[str, Shape] = {**news, "mask": (2, 1, 5, 5), "past_keys": (2, 4, 0, 8), "past_values": (2, 4, 0, 8)}
    later: dict[str, Shape] = {**news, "mask": (2, 1, 5, 8), "past_keys": (2, 4, 3, 8), "past_values": (2, 4, 3, 8)}
    check(model, tmp_path, shapes, later)


def test_width_of_keys_is_known_by_the_queries(tmp_path: Path) -> None:
    """Inference loses a factor of the keys, and no other sizes tell the axes apart. One row is not the batch either."""
    model = onnx.parser.parse_model("""
        <ir_version: 8, opset_import: ["" : 17]>
        lost (float[batch, 4, length, 8] q, float[batch, 4, length, 8] k, float[batch, 4, length, 8] v,
              float[masks, 1, length, length] mask) => (float[batch, 4, length, 8] y)
        <int64[2] parts = {3, 2}, int64 minus = {-1}, int64 one = {1}>
        {
            shape = Shape (k)
            negative = Equal (shape, minus)
            target = Where (negative, one, shape)
            same = Reshape (k, target)
            first, second = Split <axis = 2> (same, parts)
            keys = Concat <axis = 2> (first, second)
            turned = Transpose <perm = [0, 1, 3, 2]> (keys)
            scores = MatMul (q, turned)
            masked = Add (scores, mask)
            weights = Softmax <axis = -1> (masked)
            y = MatMul (weights, v)
        }
    """)
    one, two = (dict.fromkeys("qkv", (rows, 4, 5, 8)) for rows in (1, 2))
    check(model, tmp_path, {**one, "mask": (1, 1, 5, 5)}, *({**two, "mask": (rows, 1, 5, 5)} for rows in (1, 2)))


def check(model: onnx.ModelProto, folder: Path, shapes: Mapping[str, Shape], *others: Mapping[str, Shape]) -> list[str]:
    """Check that a model's one attention is fused and gives the same outputs, with other shapes too.

    Returns the operators of the fused model.
    """
    path = folder / "model.onnx"
    onnx.save(model, path)
    analysis = analyze(path, AskedShapes(shapes), 1)
    made = fuse(analysis.graph, analysis.shapes, analysis.costs.bound, ANY)
    assert [(outcome.operator, outcome.why) for outcome in made.outcomes] == [("MultiHeadAttention", None)]
    random = np.random.default_rng(0)
    for sizes in (shapes, *others):
        inputs = {name: random.standard_normal(shape).astype(np.float32) for name, shape in sizes.items()}
        np.testing.assert_allclose(run(ir.to_proto(made.graph.model), inputs), run(model, inputs), rtol=0, atol=2e-6)
    return operators(made.graph.graph)


WIDE = [
    Form("before", dtype=onnx.TensorProto.FLOAT16, widened=True),
    Form("split", dtype=onnx.TensorProto.FLOAT16, widened=True, layout="merged"),
    Form(dtype=onnx.TensorProto.FLOAT16, wide_softmax=True, bias="mask"),
]


@pytest.mark.parametrize("form", WIDE)
def test_halves_that_were_widened_are_fused_as_halves(tmp_path: Path, form: Form) -> None:
    model = write(form, SIZE)
    made = fused(model, tmp_path, SIZE, form)
    assert [outcome.operator for outcome in made.outcomes] == ["MultiHeadAttention"]
    types = [node.inputs[0].dtype for node in made.graph.graph if node.op_type == "MultiHeadAttention"]  # type: ignore[union-attr]
    assert types == [ir.DataType.FLOAT16]
    inputs = feeds(form, SIZE)
    np.testing.assert_allclose(run(ir.to_proto(made.graph.model), inputs), run(model, inputs), rtol=0, atol=4e-3)


def test_attention_inside_an_if_says_so(tmp_path: Path) -> None:
    model = onnx.parser.parse_model("""
        <ir_version: 8, opset_import: ["" : 17]>
        branches (float[b, 4, l, 8] q, float[b, 4, 8, l] k, float[b, 4, l, 8] v, bool c) => (float[b, 4, l, 8] y)
        {
            y = If (c) <
                then_branch = attends () => (float[b, 4, l, 8] made) {
                    scores = MatMul (q, k)
                    weights = Softmax <axis = -1> (scores)
                    made = MatMul (weights, v)
                },
                else_branch = passes () => (float[b, 4, l, 8] kept) { kept = Identity (q) }
            >
        }
    """)
    path = tmp_path / "model.onnx"
    onnx.save(model, path)
    analysis = analyze(path, AskedShapes({"q": (2, 4, 5, 8), "k": (2, 4, 8, 5), "v": (2, 4, 5, 8), "c": ()}), 1)
    made = fuse(analysis.graph, analysis.shapes, analysis.costs.bound, ANY)
    assert [outcome.why for outcome in made.outcomes] == ["it is inside an If or a Loop"]


def test_rows_of_which_a_mask_hides_all_weigh_all_values_alike(tmp_path: Path) -> None:
    """As with a low number for each key, after the Softmax subtracts the maximum."""
    form = Form(bias="where")
    model = write(form, SIZE)
    inputs = feeds(form, SIZE)
    inputs["mask"][0, 0, :2] = False
    made = fused(model, tmp_path, SIZE, form)
    np.testing.assert_allclose(run(ir.to_proto(made.graph.model), inputs), run(model, inputs), rtol=0, atol=2e-6)


@pytest.mark.parametrize("read", ["scores", "weights", "y"])
def test_sizes_of_scores_may_be_an_output(tmp_path: Path, read: str) -> None:
    """Planning crashed on it: the Shape that the model returns can't be replaced."""
    model = onnx.parser.parse_model(f"""
        <ir_version: 8, opset_import: ["" : 17]>
        attention (float[batch, 4, length, 8] q, float[batch, 4, all, 8] k, float[batch, 4, all, 8] v)
            => (float[batch, 4, length, 8] y, int64[4] sizes)
        {{
            t = Transpose <perm = [0, 1, 3, 2]> (k)
            scores = MatMul (q, t)
            weights = Softmax <axis = -1> (scores)
            y = MatMul (weights, v)
            sizes = Shape ({read})
        }}
    """)
    onnx.save(model, tmp_path / "model.onnx")
    shapes = {"q": (2, 4, 5, 8), "k": (2, 4, 7, 8), "v": (2, 4, 7, 8)}
    analysis = analyze(tmp_path / "model.onnx", AskedShapes(shapes), 1)
    made = fuse(analysis.graph, analysis.shapes, analysis.costs.bound, ANY)
    assert [outcome.operator for outcome in made.outcomes] == ["MultiHeadAttention" if read == "y" else None]
    given = {name: np.random.default_rng(0).random(shape, np.float32) for name, shape in shapes.items()}
    for actual, expected in zip(
        run_each(ir.to_proto(made.graph.model), [given]), run_each(model, [given]), strict=True
    ):
        np.testing.assert_allclose(actual, expected, rtol=0, atol=2e-6)


def test_attention_may_be_an_output_of_the_model(tmp_path: Path) -> None:
    """And a scale that requests may override stays where it is."""
    model = onnx.parser.parse_model("""
        <ir_version: 8, opset_import: ["" : 17]>
        outputs (float[batch, 4, length, 8] q, float[batch, 4, 8, length] k, float[batch, 4, length, 8] v,
                 float scale = {0.5}) => (float[batch, 4, length, 8] y)
        {
            scaled = Mul (q, scale)
            scores = MatMul (scaled, k)
            weights = Softmax <axis = -1> (scores)
            y = MatMul (weights, v)
        }
    """)
    path = tmp_path / "model.onnx"
    onnx.save(model, path)
    shapes = {"q": (2, 4, 5, 8), "k": (2, 4, 8, 5), "v": (2, 4, 5, 8)}
    analysis = analyze(path, AskedShapes(shapes), 1)
    made = fuse(analysis.graph, analysis.shapes, analysis.costs.bound, ANY)
    assert [outcome.operator for outcome in made.outcomes] == ["MultiHeadAttention"]
    assert [value.name for value in made.graph.graph.outputs] == ["y"] and "Mul" in operators(made.graph.graph)
    inputs = {
        name: np.random.default_rng(0).standard_normal(shape).astype(np.float32) for name, shape in shapes.items()
    }
    np.testing.assert_allclose(run(ir.to_proto(made.graph.model), inputs), run(model, inputs), rtol=0, atol=2e-6)


PACKAGES = [
    ("layer", Form(scale="split", bias="mask", keys="cache")),
    ("tensor", Form(scale="split", bias="mask", keys="cache")),
    ("tensor", Form(bias="where", layout="merged", reads_sizes=True)),
    ("tensor", Form(layout="rows")),
    ("tensor", Form(bias="where", layout="einsum")),
]


@pytest.mark.parametrize(("mode", "form"), PACKAGES, ids=[f"{mode}-{form.layout}" for mode, form in PACKAGES])
def test_package_of_a_fused_model_gives_what_the_unfused_one_does(
    tmp_path: Path, mode: str, form: Form, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """With gains as on GPUs: each rank has its heads in one operator. The explained plan has a line for each."""
    path = tmp_path / "model.onnx"
    onnx.save(write(form, SIZE, blocks=4), path)
    monkeypatch.setattr("splitc.compiler.modes.asked.gains_of", lambda engine, devices: ANY)
    inputs = feeds(form, SIZE)
    shapes = {name: array.shape for name, array in inputs.items()}
    plan = plan_model(path, ["2xcpu"], Request(split_mode=mode, shapes=shapes, spread=True))
    assert [outcome.operator for outcome in plan.analysis.outcomes] == ["MultiHeadAttention"] * 4
    check_explained(plan)
    print_explained(plan)
    lines = capsys.readouterr().out.splitlines()
    assert sum("node_softmax" in line and "MultiHeadAttention" in line for line in lines) == 4
    compile_model(plan, tmp_path / "package", verify=False)
    assert plan_model(path, ["2xcpu"], Request(shapes=shapes, no_fuse=True)).analysis.outcomes == ()
    with Session(tmp_path / "package") as session:
        np.testing.assert_allclose(session.run(inputs)["y"], run_whole(path, inputs)["y"], rtol=0, atol=1e-5)


def test_page_of_a_plan_says_what_was_fused_and_why_the_rest_was_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """As the terminal does. The page of a model without fusion has no such section."""
    path = tmp_path / "model.onnx"
    onnx.save(write(Form(), SIZE, blocks=2), path)
    shapes = {name: array.shape for name, array in feeds(Form(), SIZE).items()}
    sections = {}
    for least in (0, 1 << 16):
        gains = replace(ANY, least_scores=least)
        monkeypatch.setattr("splitc.compiler.modes.asked.gains_of", lambda engine, devices, gains=gains: gains)
        plan = plan_model(path, ["cpu0"], Request(shapes=shapes))
        sections[least] = next(section for section in plan_chapter("", plan, ()).sections if section.title == "Fusion")
    fused_all, fused_none = sections.values()
    print_plan(plan)
    assert fused_all.notes == ["attention fused: 2 of 2"]
    assert [row[1:] for row in fused_all.tables[0].rows] == [("MultiHeadAttention", "")] * 2
    assert fused_none.notes == ["attention fused: 0 of 2"]
    assert fused_none.tables[0].rows == [("2", "its scores (queries x keys) are too few for one operator to be faster")]
    said = capsys.readouterr().out
    assert (
        "attention fused: 0 of 2\n  2 not: its scores (queries x keys) are too few for one operator to be faster\n"
        in said
    )
    unfused = plan_model(path, ["cpu0"], Request(shapes=shapes, no_fuse=True))
    assert "Fusion" not in [section.title for section in plan_chapter("", unfused, ()).sections]


def test_folder_says_of_each_model_what_was_fused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """On the terminal in one line a model, on the page in each model's chapter."""
    monkeypatch.setattr("splitc.compiler.modes.asked.gains_of", lambda engine, devices: ANY)
    for name, blocks in (("one", 1), ("three", 3)):
        (tmp_path / name).mkdir()
        onnx.save(write(Form(), SIZE, blocks), tmp_path / name / "model.onnx")
    plan = plan_pipeline(tmp_path, ["cpu0"], Request(memory=["1GiB"]))
    print_pipeline(plan)
    said = capsys.readouterr().out
    assert "one: attention fused: 1 of 1\n" in said and "three: attention fused: 3 of 3\n" in said
    chapters = {
        chapter.title: [section.title for section in chapter.sections] for chapter in pipeline_page(plan).chapters
    }
    assert "Fusion" in chapters["one"] and "Fusion" in chapters["three"] and "Fusion" not in chapters["All modules"]
