"""Attention that was written out becomes one operator, in whatever form it was written, and gives the same numbers."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from itertools import product
from pathlib import Path

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime as ort
import pytest

from splitc.compiler import Request, compile_model, plan_model, plan_pipeline
from splitc.compiler.analysis.facts import analyze
from splitc.compiler.fusion.fuse import Fate, Fused, fuse
from splitc.compiler.request.shapes import AskedShapes
from splitc.compiler.show.pipeline_page import pipeline_page
from splitc.compiler.show.pipeline_tables import print_pipeline
from splitc.compiler.show.plan_page import plan_chapter
from splitc.compiler.show.plan_tables import print_plan
from splitc.runtime import Session
from tests.conftest import run_whole
from tests.helpers.written_attention import Form, Size, feeds, operators, write

SIZE = Size()
ANY = (ir.DataType.FLOAT, ir.DataType.FLOAT16)
OTHER = replace(SIZE, batch=3, length=9, all=4)
FORMS = [
    Form(scale, bias, keys, groups, guard, flipped)
    for scale, bias, keys, (groups, guard, flipped) in product(
        ("after", "before", "split", "none"),
        ("none", "mask", "row", "learned", "both"),
        ("once", "twice", "cache"),
        ((1, False, False), (2, True, True)),
    )
] + [Form(bias=bias, opset=12) for bias in ("mask", "row", "learned", "both")]


def fused(model: onnx.ModelProto, folder: Path, size: Size, form: Form) -> Fused:
    path = folder / "model.onnx"
    onnx.save(model, path)
    shapes = {name: array.shape for name, array in feeds(form, size).items()}
    analysis = analyze(path, AskedShapes(shapes), 1)
    return fuse(analysis.graph, analysis.shapes, analysis.costs.bound, ANY, least=0)


def run(model: onnx.ModelProto, inputs: dict[str, np.ndarray]) -> np.ndarray:
    options = ort.SessionOptions()
    options.intra_op_num_threads = 1
    session = ort.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
    return np.asarray(session.run(None, inputs)[0])


@pytest.mark.parametrize("number", range(0, len(FORMS)))
def test_every_form_is_fused_and_gives_the_same(tmp_path: Path, number: int) -> None:
    form = FORMS[number]
    model = write(form, SIZE, blocks=2, seed=number)
    made = fused(model, tmp_path, SIZE, form)
    assert made.fates == (
        Fate(made.fates[0].softmax, "MultiHeadAttention"),
        Fate(made.fates[1].softmax, "MultiHeadAttention"),
    )
    names = operators(made.graph.graph)
    assert names.count("com.microsoft.MultiHeadAttention") == 2 and "Softmax" not in names
    proto = ir.to_proto(made.graph.model)
    sizes = [SIZE] if form.bias in ("learned", "both") else [SIZE, OTHER]
    for size in sizes:
        inputs = feeds(form, size, seed=number)
        np.testing.assert_allclose(run(proto, inputs), run(model, inputs), rtol=0, atol=2e-6)
    for value in (value for node in made.graph.graph for value in node.outputs):
        assert value.name in made.bound.shapes


ODD = [
    (Form(), {"FLOAT"}, "it is too small to be faster as one operator"),
    (Form(dtype=onnx.TensorProto.FLOAT16), {"FLOAT"}, "no kernel is faster for its type, FLOAT16"),
    (Form(scale="late", bias="mask"), {"FLOAT"}, "its scores are scaled after a mask was added"),
    (Form(tanh=True), {"FLOAT"}, "its scores pass a Tanh"),
    (Form(softmax_axis=2), {"FLOAT"}, "the Softmax is not known to be over the last axis"),
]


@pytest.mark.parametrize(("form", "types", "why"), ODD, ids=[why for *_, why in ODD])
def test_what_is_not_fused_says_why(tmp_path: Path, form: Form, types: set[str], why: str) -> None:
    path = tmp_path / "model.onnx"
    onnx.save(write(form, SIZE), path)
    analysis = analyze(path, AskedShapes({name: array.shape for name, array in feeds(form, SIZE).items()}), 1)
    least = SIZE.length * SIZE.all + ("small" in why)
    made = fuse(analysis.graph, analysis.shapes, analysis.costs.bound, [ir.DataType[name] for name in types], least)
    assert [fate.why for fate in made.fates] == [why]
    assert "Softmax" in operators(made.graph.graph)


def test_heads_whose_number_depends_on_the_request_stay(tmp_path: Path) -> None:
    """Windows of a picture lie where heads do: their number is no attribute."""
    model = onnx.parser.parse_model("""
        <ir_version: 8, opset_import: ["" : 17]>
        windows (float[batch, count, length, 8] q, float[batch, count, 8, length] k, float[batch, count, length, 8] v)
            => (float[batch, count, length, 8] y)
        { scores = MatMul (q, k)  weights = Softmax <axis = -1> (scores)  y = MatMul (weights, v) }
    """)
    path = tmp_path / "model.onnx"
    onnx.save(model, path)
    shapes = {"q": (2, 4, 5, 8), "k": (2, 4, 8, 5), "v": (2, 4, 5, 8)}
    analysis = analyze(path, AskedShapes(shapes), 1)
    made = fuse(analysis.graph, analysis.shapes, analysis.costs.bound, ANY, least=0)
    why = "the number and the size of its heads may change from request to request"
    assert [fate.why for fate in made.fates] == [why]


def test_attention_may_be_an_output_of_the_model(tmp_path: Path) -> None:
    """And a scale that a request may override stays where it is."""
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
    made = fuse(analysis.graph, analysis.shapes, analysis.costs.bound, ANY, least=0)
    assert [fate.operator for fate in made.fates] == ["MultiHeadAttention"]
    assert [value.name for value in made.graph.graph.outputs] == ["y"] and "Mul" in operators(made.graph.graph)
    inputs = {
        name: np.random.default_rng(0).standard_normal(shape).astype(np.float32) for name, shape in shapes.items()
    }
    np.testing.assert_allclose(run(ir.to_proto(made.graph.model), inputs), run(model, inputs), rtol=0, atol=2e-6)


@pytest.mark.parametrize("mode", ["layer", "tensor"])
def test_package_of_a_fused_model_gives_what_the_unfused_one_does(
    tmp_path: Path, mode: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on GPUs: each rank has its heads in one operator."""
    form = Form(scale="split", bias="mask", keys="cache")
    path = tmp_path / "model.onnx"
    onnx.save(write(form, SIZE, blocks=4), path)
    monkeypatch.setattr("splitc.compiler.modes.asked.gains_by_fusion", lambda engine, devices: True)
    monkeypatch.setattr("splitc.compiler.analysis.facts.fuse", partial(fuse, types=ANY, least=0))
    inputs = feeds(form, SIZE)
    shapes = {name: array.shape for name, array in inputs.items()}
    plan = plan_model(path, ["2xcpu"], Request(split_mode=mode, shapes=shapes, spread=True))
    assert [fate.operator for fate in plan.analysis.fates] == ["MultiHeadAttention"] * 4
    compile_model(plan, tmp_path / "package")
    assert plan_model(path, ["2xcpu"], Request(shapes=shapes, no_fuse=True)).analysis.fates == ()
    with Session(tmp_path / "package") as session:
        np.testing.assert_allclose(session.run(inputs)["y"], run_whole(path, inputs)["y"], rtol=0, atol=1e-5)


def test_page_of_a_plan_says_what_was_fused_and_why_the_rest_was_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """As the terminal does; a page of a model in which no attention was looked for has no such section."""
    path = tmp_path / "model.onnx"
    onnx.save(write(Form(), SIZE, blocks=2), path)
    monkeypatch.setattr("splitc.compiler.modes.asked.gains_by_fusion", lambda engine, devices: True)
    shapes = {name: array.shape for name, array in feeds(Form(), SIZE).items()}
    sections = {}
    for least in (0, 1 << 16):
        monkeypatch.setattr("splitc.compiler.analysis.facts.fuse", partial(fuse, types=ANY, least=least))
        plan = plan_model(path, ["cpu0"], Request(shapes=shapes))
        sections[least] = next(section for section in plan_chapter("", plan).sections if section.title == "Fusion")
    fused_all, fused_none = sections.values()
    print_plan(plan)
    assert fused_all.notes == ["attention fused: 2 of 2"]
    assert [row[1:] for row in fused_all.tables[0].rows] == [("MultiHeadAttention", "")] * 2
    assert fused_none.notes == ["attention fused: 0 of 2"]
    assert fused_none.tables[0].rows == [("2", "it is too small to be faster as one operator")]
    said = capsys.readouterr().out
    assert "attention fused: 0 of 2\n  2 not: it is too small to be faster as one operator\n" in said
    unfused = plan_model(path, ["cpu0"], Request(shapes=shapes, no_fuse=True))
    assert "Fusion" not in [section.title for section in plan_chapter("", unfused).sections]


def test_folder_says_of_each_model_what_was_fused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """On the terminal in a line, and in the model's chapter of the page."""
    monkeypatch.setattr("splitc.compiler.modes.asked.gains_by_fusion", lambda engine, devices: True)
    monkeypatch.setattr("splitc.compiler.analysis.facts.fuse", partial(fuse, types=ANY, least=0))
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
