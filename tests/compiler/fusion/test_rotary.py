"""A decomposed rotary embedding becomes one operator with the same numbers."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import onnx
import onnx_ir as ir
import pytest

from splitc.compiler import Request, compile_model, plan_model
from splitc.compiler.analysis.facts import analyze
from splitc.compiler.fusion.fuse import Fused, fuse
from splitc.compiler.request.shapes import AskedShapes
from splitc.runtime import Session
from splitc.runtime.engines.onnxruntime_cpu import ERRORS
from splitc.runtime.errors import FeedError
from tests.compiler.fusion.test_assembled import fronted
from tests.compiler.fusion.test_fuse import ANY, run
from tests.helpers.written_attention import operators

HEAD = '<ir_version: 8, opset_import: ["" : 18]>'
BATCH, LENGTH, HEADS, SIZE = 3, 5, 4, 8
BOUNDS = """
    zero = Constant <value_ints = [0]> ()  half = Constant <value_ints = [4]> ()  all = Constant <value_ints = [8]> ()
    last = Constant <value_ints = [-1]> ()  one = Constant <value_ints = [1]> ()  two = Constant <value_ints = [2]> ()
    heads = Constant <value_ints = [{heads}]> ()
"""
# Angles [batch, length, pairs] of positions [batch, length], or [length, pairs] of the places in a row.
ANGLES = {
    "fed": """wide = Cast <to = 1> (positions)  column = Unsqueeze (wide, last)
        frequencies = Constant <value_floats = [1.0, 0.3, 0.1, 0.03]> ()  angles = Mul (column, frequencies)""",
    "counted": """sizes = Shape (positions)  at = Constant <value_int = 1> ()  count = Gather (sizes, at)
        start = Constant <value_int = 0> ()  numbers = Range (start, count, at)  wide = Cast <to = 1> (numbers)
        column = Unsqueeze (wide, last)
        frequencies = Constant <value_floats = [1.0, 0.3, 0.1, 0.03]> ()  angles = Mul (column, frequencies)""",
}
# A copy of a table of 50 positions for each row of the batch, and places in it, as torch's older exporter writes GPT-J.
PICKED = """first = Constant <value_float = 0.0> ()  step = Constant <value_float = 1.0> ()
    stop = Constant <value_float = 50.0> ()  numbers = Range (first, stop, step)  column = Unsqueeze (numbers, last)
    frequencies = Constant <value_floats = [1.0, 0.3, 0.1, 0.03]> ()  table = Mul (column, frequencies)
    sizes = Shape (positions)  rows = Slice (sizes, zero, one)  copies = Concat <axis = 0> (rows, one, one)
    length = Shape (copies)  ones = ConstantOfShape <value = int64[1] {1}> (length)
    flat_table = Expand (table, ones)  tables = Tile (flat_table, copies)
    thin_places = Unsqueeze (positions, last)  fours = Constant <value_ints = [1, 1, 4]> ()
    places = Tile (thin_places, fours)  angles = GatherElements <axis = 1> (tables, places)"""
# A number for each element: the pairs' halves follow each other, or each pair its neighbour.
TWICE = {
    False: "twice = Concat <axis = -1> (angles, angles)",
    True: """thin = Unsqueeze (angles, last)  neighbours = Concat <axis = -1> (thin, thin)
        flat = Constant <value_ints = [{rows}8]> ()  twice = Reshape (neighbours, flat)""",
}
TABLES = """cosines = Cos ({angles})  sines = Sin ({angles})
    cos = Unsqueeze (cosines, heads)  sin = Unsqueeze (sines, heads)"""
SLICED = "a = Slice (x, zero, half, last)  b = Slice (x, half, all, last)"
PARTS = {
    "slices": SLICED,
    "split": "a, b = Split <axis = -1, num_outputs = 2> (x)",
    "gathered": """first = Constant <value_ints = [0, 1, 2, 3]> ()  second = Constant <value_ints = [4, 5, 6, 7]> ()
        a = Gather <axis = -1> (x, first)  b = Gather <axis = 3> (x, second)""",
}
NEIGHBOURS = """pairs = Constant <value_ints = [0, 0, 0, 4, 2]> ()  by_pairs = Reshape (x, pairs)
    thin_a, thin_b = Split <axis = -1, num_outputs = 2> (by_pairs)
    a = Squeeze (thin_a, last)  b = Squeeze (thin_b, last)"""
STRIDED = """a = Slice (x, zero, all, last, two)  b = Slice (x, one, all, last, two)"""
JOINED = {
    False: "turned = Concat <axis = -1> ({0}, {1})",
    True: """thin_0 = Unsqueeze ({0}, last)  thin_1 = Unsqueeze ({1}, last)
        stacked = Concat <axis = -1> (thin_0, thin_1)
        whole = Constant <value_ints = [0, 0, 0, 8]> ()  turned = Reshape (stacked, whole)""",
}
BOTH = """ac = Mul (a, cos)  bs = Mul (sin, b)  low = Sub (ac, bs)  bc = Mul (cos, b)  as = Mul (a, sin)
    high = Add ({}, {})  """
SUM = "straight = Mul (x, cos)  crossed = Mul (turned, sin)  y = Add (crossed, straight)"
DIFFERENCE = "straight = Mul (cos, x)  crossed = Mul (turned, sin)  y = Sub (straight, crossed)"


def written(body: str, angles: str = "fed", dtype: str = "float", heads_first: bool = True) -> onnx.ModelProto:
    """A model that rotates [batch, heads, length, 8], or [batch, length, heads, 8]."""
    axes = f"batch, {HEADS}, length" if heads_first else f"batch, length, {HEADS}"
    axis = (1 if heads_first else 2) - (angles == "counted")
    shape = f"{dtype}[{axes}, 8]"
    signature = f"rotate ({shape} data, int64[batch, length] positions) => ({shape} y)"
    bounds = BOUNDS.format(heads=axis)
    cast = "x = Identity (data)" if dtype == "float" else "x = Cast <to = 1> (data)"
    return onnx.parser.parse_model(f"{HEAD} {signature} {{ {bounds} {cast} {ANGLES[angles]} {body} }}")


def twice(interleaved: bool, angles: str = "fed") -> str:
    rows = "0, 0, " if angles == "fed" else "0, "
    return TWICE[interleaved].format(rows=rows) + TABLES.format(angles="twice")


def whole(interleaved: bool, parts: str, angles: str = "fed") -> str:
    """x cos + rotated(x) sin."""
    joined = JOINED[interleaved].format("opposite", "a")
    return f"{twice(interleaved, angles)} {parts}  opposite = Neg (b)  {joined} {SUM}"


def by_pairs(interleaved: bool, parts: str, crossed: bool = False) -> str:
    """Both elements of each pair computed separately."""
    joined = JOINED[interleaved].format("low", "high").replace("turned =", "y =")
    order = ("as", "bc") if crossed else ("bc", "as")
    return f"{TABLES.format(angles='angles')} {parts} {BOTH.format(*order)} {joined}"


def feeds(dtype: str = "float", heads_first: bool = True) -> dict[str, np.ndarray]:
    random = np.random.default_rng(0)
    middle = (HEADS, LENGTH) if heads_first else (LENGTH, HEADS)
    data = random.standard_normal((BATCH, *middle, SIZE))
    positions = random.integers(0, 50, (BATCH, LENGTH))
    return {"data": data.astype(np.float32 if dtype == "float" else np.float16), "positions": positions}


def fused(model: onnx.ModelProto, folder: Path, heads_first: bool = True) -> Fused:
    path = folder / "model.onnx"
    onnx.save(model, path)
    # One position, as a decoder's step has, which may be the first.
    middle = (HEADS, 1) if heads_first else (1, HEADS)
    analysis = analyze(path, AskedShapes({"data": (2, *middle, SIZE), "positions": (2, 1)}), 1)
    return fuse(analysis.graph, analysis.shapes, analysis.costs.bound, ANY)


def check(
    model: onnx.ModelProto, folder: Path, tolerance: float, dtype: str = "float", heads_first: bool = True
) -> None:
    made = fused(model, folder, heads_first)
    assert [(outcome.kind, outcome.operator, outcome.why) for outcome in made.outcomes] == [
        ("rotary", "RotaryEmbedding", None)
    ]
    assert not {"Neg", "Sub", "Split", "Add"} & set(operators(made.graph.graph))
    inputs = feeds(dtype, heads_first)
    np.testing.assert_allclose(run(ir.to_proto(made.graph.model), inputs), run(model, inputs), rtol=0, atol=tolerance)


@pytest.mark.parametrize("angles", list(ANGLES))
@pytest.mark.parametrize("parts", list(PARTS))
@pytest.mark.parametrize("heads_first", [True, False], ids=["heads_first", "rows_first"])
def test_halves_are_rotated(tmp_path: Path, angles: str, parts: str, heads_first: bool) -> None:
    model = written(whole(False, PARTS[parts], angles), angles, heads_first=heads_first)
    check(model, tmp_path, 2e-6, heads_first=heads_first)


def test_made_up_positions_are_in_a_table_that_the_model_computes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(ANGLES, "picked", PICKED)
    check(written(whole(False, SLICED), "picked"), tmp_path, 2e-6)


def test_batch_of_one_row_is_not_fixed_where_no_other_sizes_can_be_tried(tmp_path: Path) -> None:
    """As where another input takes a single size. Batch and length are one axis, which is as long as the length."""
    body = f"{whole(False, SLICED)}  square = Constant <value_ints = [2, 2]> ()  z = Reshape (other, square)"
    text = onnx.printer.to_text(written(body)).replace("positions)", "positions, float[count] other)", 1)
    model = onnx.parser.parse_model(text.replace("8] y)", "8] y, float[2, 2] z)", 1))
    onnx.save(model, tmp_path / "model.onnx")
    shapes = {"data": (1, HEADS, LENGTH, SIZE), "positions": (1, LENGTH), "other": (4,)}
    analysis = analyze(tmp_path / "model.onnx", AskedShapes(shapes), 1)
    made = fuse(analysis.graph, analysis.shapes, analysis.costs.bound, ANY)
    assert [outcome.operator for outcome in made.outcomes] == ["RotaryEmbedding"]
    inputs = {**feeds(), "other": np.zeros(4, np.float32)}
    np.testing.assert_allclose(run(ir.to_proto(made.graph.model), inputs), run(model, inputs), rtol=0, atol=2e-6)


@pytest.mark.parametrize("axes", [f"{HEADS}, length", f"length, {HEADS}", "all, length"])
def test_data_of_three_axes(tmp_path: Path, axes: str) -> None:
    """A batch of one, as patches of images of several sizes, or heads that are merged with the batch, as ESM's."""
    heads_first, shape = axes.endswith("length"), f"float[{axes}, 8]"
    signature = f"rotate ({shape} data, int64[length] positions) => ({shape} y)"
    bounds = BOUNDS.format(heads=0 if heads_first else 1)
    body = f"{bounds} x = Identity (data) {ANGLES['fed']} {whole(False, SLICED)}"
    model = onnx.parser.parse_model(f"{HEAD} {signature} {{ {body} }}")
    onnx.save(model, tmp_path / "model.onnx")
    inputs = {name: array[0] for name, array in feeds(heads_first=heads_first).items()}
    if axes.startswith("all"):
        inputs["data"] = feeds()["data"].reshape(-1, LENGTH, SIZE)
    shapes = {"data": inputs["data"].shape, "positions": (LENGTH,)}
    analysis = analyze(tmp_path / "model.onnx", AskedShapes(shapes), 1)
    made = fuse(analysis.graph, analysis.shapes, analysis.costs.bound, ANY)
    assert [(outcome.kind, outcome.operator, outcome.why) for outcome in made.outcomes] == [
        ("rotary", "RotaryEmbedding", None)
    ]
    np.testing.assert_allclose(run(ir.to_proto(made.graph.model), inputs), run(model, inputs), rtol=0, atol=2e-6)


@pytest.mark.parametrize("parts", [NEIGHBOURS, STRIDED], ids=["pairs", "strided"])
@pytest.mark.parametrize("heads_first", [True, False], ids=["heads_first", "rows_first"])
def test_neighbours_are_rotated(tmp_path: Path, parts: str, heads_first: bool) -> None:
    check(written(whole(True, parts), heads_first=heads_first), tmp_path, 2e-6, heads_first=heads_first)


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("crossed", [False, True])
def test_elements_of_pairs_by_themselves(tmp_path: Path, interleaved: bool, crossed: bool) -> None:
    check(written(by_pairs(interleaved, NEIGHBOURS if interleaved else SLICED, crossed)), tmp_path, 2e-6)


def test_pairs_whose_sizes_are_read_before_they_are_flat(tmp_path: Path) -> None:
    """As TorchScript's exporter writes it."""
    sizes = """of_pairs = Shape (stacked)  three = Constant <value_ints = [3]> ()  first = Slice (of_pairs, zero, three)
        whole = Concat <axis = 0> (first, last)  y ="""
    constant = "whole = Constant <value_ints = [0, 0, 0, 8]> ()  y ="
    body = by_pairs(True, STRIDED)
    assert constant in body
    check(written(body.replace(constant, sizes)), tmp_path, 2e-6)


@pytest.mark.parametrize("parts", [STRIDED, SLICED], ids=["neighbours before", "halves before"])
def test_pairs_in_other_places_after_than_before(tmp_path: Path, parts: str) -> None:
    """As in DeepSeek-V3: neighbours are rotated, and stored in halves."""
    check(written(by_pairs(parts == SLICED, parts)), tmp_path, 2e-6)


def test_pairs_joined_with_what_is_not_rotated(tmp_path: Path) -> None:
    """As TorchScript's exporter writes DeepSeek's queries: one Concat of three."""
    body = by_pairs(False, STRIDED).replace("y = Concat <axis = -1> (low", "y = Concat <axis = -1> (data, low")
    model = written(body)
    model.graph.output[0].type.tensor_type.shape.dim[3].dim_value = 2 * SIZE
    check(model, tmp_path, 2e-6)


@pytest.mark.parametrize("body", [whole(False, SLICED), by_pairs(True, NEIGHBOURS), by_pairs(False, STRIDED), "three"])
def test_a_part_of_each_head_is_rotated(tmp_path: Path, body: str) -> None:
    """As in GPT-NeoX: the rest is left as it is, and cut off and joined again only for that."""
    cut = """whole_heads = Constant <value_ints = [16]> ()  x = Slice (data, zero, all, last)
        rest = Slice (data, all, whole_heads, last)"""
    if body == "three":  # TorchScript's exporter joins all at once
        written_out = by_pairs(False, SLICED).replace("(low, high)", "(low, high, rest)")
    else:
        written_out = body.replace("y =", "part =") + "  y = Concat <axis = -1> (part, rest)"
    model = written(written_out)
    text = onnx.printer.to_text(model).replace("x = Identity (data)", cut).replace(f"length,{SIZE}]", "length,16]")
    model = onnx.parser.parse_model(text)
    onnx.save(model, tmp_path / "model.onnx")
    inputs = {**feeds(), "data": np.random.default_rng(0).standard_normal((BATCH, HEADS, LENGTH, 16), np.float32)}
    shapes = {"data": (2, HEADS, 1, 16), "positions": (2, 1)}
    analysis = analyze(tmp_path / "model.onnx", AskedShapes(shapes), 1)
    made = fuse(analysis.graph, analysis.shapes, analysis.costs.bound, ANY)
    assert [(outcome.kind, outcome.operator, outcome.why) for outcome in made.outcomes] == [
        ("rotary", "RotaryEmbedding", None)
    ]
    fused_model = ir.to_proto(made.graph.model)
    (rotary,) = (node for node in fused_model.graph.node if node.op_type == "RotaryEmbedding")
    assert {item.name: item.i for item in rotary.attribute}["rotary_embedding_dim"] == SIZE
    assert "Slice" not in operators(made.graph.graph)
    np.testing.assert_allclose(run(fused_model, inputs), run(model, inputs), rtol=0, atol=2e-6)


def test_heads_that_are_transposed_before_they_are_split(tmp_path: Path) -> None:
    """GPT-NeoX has queries, keys and values in each head, and rotates a part of two: the operator takes rows first."""
    signature = f"""rotate (float[batch, length, {HEADS * 24}] data, float[batch, length, 2] cos,
        float[batch, length, 2] sin) => (float[batch, {HEADS}, length, 8] y, float[batch, length, {HEADS}, 8] v)"""
    body = f"""apart = Constant <value_ints = [0, 0, {HEADS}, 24]> ()  rows = Reshape (data, apart)
        heads = Transpose <perm = [0, 2, 1, 3]> (rows)  q, k, w = Split <axis = 3, num_outputs = 3> (heads)
        zero = Constant <value_ints = [0]> ()  half = Constant <value_ints = [4]> ()
        all = Constant <value_ints = [8]> ()  last = Constant <value_ints = [3]> ()
        first = Slice (q, zero, half, last)  rest = Slice (q, half, all, last)
        turned = RotaryEmbedding (first, cos, sin)  joined = Concat <axis = -1> (turned, rest)  y = Add (joined, k)
        v = Transpose <perm = [0, 2, 1, 3]> (w)"""
    model = onnx.parser.parse_model(f'<ir_version: 10, opset_import: ["" : 23]> {signature} {{ {body} }}')
    onnx.save(model, tmp_path / "model.onnx")
    random = np.random.default_rng(0)
    shapes = {"data": (2, 3, HEADS * 24), "cos": (2, 3, 2), "sin": (2, 3, 2)}
    analysis = analyze(tmp_path / "model.onnx", AskedShapes(shapes), 1)
    made = fuse(analysis.graph, analysis.shapes, analysis.costs.bound, ANY)
    assert [(outcome.kind, outcome.operator) for outcome in made.outcomes] == [("rotary", "RotaryEmbedding")]
    names = operators(made.graph.graph)
    assert names.index("Split") < names.index("Transpose")
    assert not {"Slice", "Concat"} & set(names)
    inputs = {name: random.random((BATCH, *shape[1:]), np.float32) for name, shape in shapes.items()}
    np.testing.assert_allclose(run(ir.to_proto(made.graph.model), inputs), run(model, inputs), rtol=0, atol=2e-6)


def test_pairs_that_are_assigned_to_every_second_place(tmp_path: Path) -> None:
    """As Wan's: `out[..., 0::2] = low`, and `out[..., 1::2] = high`."""
    body = by_pairs(True, NEIGHBOURS)
    body = body[: body.index("thin_0")] + "whole = Shape (x)  empty = ConstantOfShape (whole)"
    body += fronted(0, "empty", "low", 0, SIZE, 2) + fronted(1, "made_0", "high", 1, SIZE, 2) + "y = Identity (made_1)"
    check(written(f"start = Constant <value_int = 0> ()  step = Constant <value_int = 1> ()  {body}"), tmp_path, 2e-6)


def test_pairs_that_are_a_view_of_merged_heads(tmp_path: Path) -> None:
    """An optimizer has made one Reshape of two: no value has four axes before the pairs."""
    body = by_pairs(True, NEIGHBOURS).replace("[0, 0, 0, 4, 2]", f"[0, 0, {HEADS}, 4, 2]")
    text = onnx.printer.to_text(written(body, heads_first=False))
    axes = f"length,{HEADS},{SIZE}] data"
    assert axes in text
    model = onnx.parser.parse_model(text.replace(axes, f"length,{HEADS * SIZE}] data"))
    onnx.save(model, tmp_path / "model.onnx")
    shapes = {"data": (2, 1, HEADS * SIZE), "positions": (2, 1)}
    analysis = analyze(tmp_path / "model.onnx", AskedShapes(shapes), 1)
    made = fuse(analysis.graph, analysis.shapes, analysis.costs.bound, ANY)
    assert [(outcome.kind, outcome.operator, outcome.why) for outcome in made.outcomes] == [
        ("rotary", "RotaryEmbedding", None)
    ]
    inputs = feeds(heads_first=False)
    inputs["data"] = inputs["data"].reshape(BATCH, LENGTH, -1)
    np.testing.assert_allclose(run(ir.to_proto(made.graph.model), inputs), run(model, inputs), rtol=0, atol=2e-6)


@pytest.mark.parametrize("interleaved", [0, 1])
def test_an_operator_comes_before_heads_do(tmp_path: Path, interleaved: int) -> None:
    """Newer exporters apply it to [batch, heads, length, size], between two transposes that can be merged."""
    signature = f"""rotate (float[batch, length, {HEADS * SIZE}] data, float[batch, length, {SIZE // 2}] cos,
        float[batch, length, {SIZE // 2}] sin) => (float[batch, {HEADS}, length, {SIZE}] y)"""
    body = f"""apart = Constant <value_ints = [0, 0, {HEADS}, {SIZE}]> ()  rows = Reshape (data, apart)
        heads = Transpose <perm = [0, 2, 1, 3]> (rows)
        rotated = RotaryEmbedding <interleaved = {interleaved}> (heads, cos, sin)  y = Neg (rotated)"""
    model = onnx.parser.parse_model(f'<ir_version: 10, opset_import: ["" : 23]> {signature} {{ {body} }}')
    onnx.save(model, tmp_path / "model.onnx")
    random = np.random.default_rng(0)
    shapes = {"data": (2, 3, HEADS * SIZE), "cos": (2, 3, SIZE // 2), "sin": (2, 3, SIZE // 2)}
    analysis = analyze(tmp_path / "model.onnx", AskedShapes(shapes), 1)
    made = fuse(analysis.graph, analysis.shapes, analysis.costs.bound, ANY)
    assert [(outcome.kind, outcome.operator) for outcome in made.outcomes] == [("rotary", "RotaryEmbedding")]
    names = operators(made.graph.graph)
    assert names.index("RotaryEmbedding") < names.index("Transpose")
    inputs = {name: random.random((BATCH, *shape[1:]), np.float32) for name, shape in shapes.items()}
    np.testing.assert_allclose(run(ir.to_proto(made.graph.model), inputs), run(model, inputs), rtol=0, atol=2e-6)


def test_parts_of_complex_numbers(tmp_path: Path) -> None:
    """As in DeepSeek-V2: pairs have an axis of their own, and so do the tables."""
    parts = """pairs = Constant <value_ints = [0, 0, 0, 4, 2]> ()  by_pairs = Reshape (x, pairs)
        a = Slice (by_pairs, zero, one, last)  b = Slice (by_pairs, one, two, last)"""
    thin = TABLES.format(angles="angles").replace("cos =", "cos_0 =").replace("sin =", "sin_0 =")
    body = f"""{thin}  cos = Unsqueeze (cos_0, last)  sin = Unsqueeze (sin_0, last) {parts} {BOTH.format("bc", "as")}
        complex = Concat <axis = -1> (low, high)  flat = Constant <value_ints = [0, 0, 0, 8]> ()
        y = Reshape (complex, flat)"""
    check(written(body), tmp_path, 2e-6)


@pytest.mark.parametrize("planned", [1, 2], ids=["one", "all"])
def test_positions_whose_rows_are_not_known_to_be_the_batch(tmp_path: Path, planned: int) -> None:
    """They have their own symbol: there may be one for each row, or one for all."""
    model = written(whole(False, SLICED), angles="fed")
    model.graph.input[1].type.tensor_type.shape.dim[0].dim_param = "rows"
    onnx.save(model, tmp_path / "model.onnx")
    shapes = {"data": (2, HEADS, 3, SIZE), "positions": (planned, 3)}
    analysis = analyze(tmp_path / "model.onnx", AskedShapes(shapes), 1)
    made = fuse(analysis.graph, analysis.shapes, analysis.costs.bound, ANY)
    assert [outcome.operator for outcome in made.outcomes] == ["RotaryEmbedding"]
    inputs, result = feeds(), ir.to_proto(made.graph.model)
    for rows in (1, BATCH):
        fed = {**inputs, "positions": inputs["positions"][:rows]}
        np.testing.assert_allclose(run(result, fed), run(model, fed), rtol=0, atol=1e-5)
    with pytest.raises(ERRORS):  # the operator would take some of the rows
        run(result, {**inputs, "data": inputs["data"][:1]})


def test_data_and_positions_that_are_joined_from_inputs_of_their_own_lengths(tmp_path: Path) -> None:
    """As of a text and an image: no input has the length of all, and only the data say how many rows there are."""
    text = onnx.printer.to_text(written(whole(False, SLICED)))
    for own, axis in (("data", 2), ("positions", 1)):
        declared = next(line for line in re.findall(r"[^(,]+\[[^]]*\] " + own, text))
        halves = [declared.replace("length", f"{own}{n}").replace(f" {own}", f" {own}_{n}") for n in range(2)]
        text = text.replace(declared, ",".join(halves))
        text = text.replace("{", f"{{ {own} = Concat <axis = {axis}> ({own}_0, {own}_1) ", 1)
    model = onnx.parser.parse_model(text.replace(f"{HEADS},length,{SIZE}] y", f"{HEADS},rows,{SIZE}] y"))
    onnx.save(model, tmp_path / "model.onnx")
    shapes: dict[str, tuple[int, ...]] = {f"data_{n}": (2, HEADS, 3 + n, SIZE) for n in range(2)}
    shapes.update({f"positions_{n}": (2, 3 + n) for n in range(2)})
    analysis = analyze(tmp_path / "model.onnx", AskedShapes(shapes), 1)
    made = fuse(analysis.graph, analysis.shapes, analysis.costs.bound, ANY)
    assert [outcome.operator for outcome in made.outcomes] == ["RotaryEmbedding"]
    whole_inputs, result = feeds(), ir.to_proto(made.graph.model)

    def cut(of_data: int, of_positions: int) -> dict[str, np.ndarray]:
        data = np.split(whole_inputs["data"], [of_data], 2)
        positions = np.split(whole_inputs["positions"], [of_positions], 1)
        return {**{f"data_{n}": data[n] for n in range(2)}, **{f"positions_{n}": positions[n] for n in range(2)}}

    for sizes in ((1, 1), (2, 1)):
        np.testing.assert_allclose(run(result, cut(*sizes)), run(model, cut(*sizes)), rtol=0, atol=1e-5)
    more = {**cut(1, 1), "positions_0": whole_inputs["positions"]}
    for one in (model, result):
        with pytest.raises(ERRORS):
            run(one, more)


def test_tables_of_as_many_rows_as_something_has_that_takes_long(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only the size of an expensive value is needed, such as that of convolutions of a sound."""
    monkeypatch.setattr("splitc.compiler.patterns.tables.MOST_NODES", 16)
    chain = "n0 = Abs (positions)  " + "  ".join(f"n{k + 1} = Abs (n{k})" for k in range(20))
    body = whole(False, PARTS["slices"], "counted")
    model = written(body, "counted")
    text = onnx.printer.to_text(model).replace("Shape (positions)", "Shape (n20)").replace("{", "{ " + chain, 1)
    check(onnx.parser.parse_model(text), tmp_path, 2e-6)


def test_a_difference_with_the_opposite_rotation(tmp_path: Path) -> None:
    joined = JOINED[False].format("b", "opposite")
    check(written(f"{twice(False)} {SLICED}  opposite = Neg (a)  {joined} {DIFFERENCE}"), tmp_path, 2e-6)


def test_halves_in_single_precision_between_casts(tmp_path: Path) -> None:
    body = whole(True, NEIGHBOURS).replace("y = Add", "wide_y = Add") + "  y = Cast <to = 10> (wide_y)"
    check(written(body, dtype="float16"), tmp_path, 4e-3, "float16")


DIFFERENT = "  late = Mul (angles, frequencies)  twice = Concat <axis = -1> (angles, late)" + TABLES.format(
    angles="twice"
)
TURNED = f"{SLICED}  opposite = Neg (b)  " + JOINED[False].format("opposite", "a") + SUM
BY_HEADS = f"""frequencies_of_heads = Constant <value_floats = {[n / 7 for n in range(16)]}> ()
    grid = Constant <value_ints = [4, 1, 4]> ()  angles_of_heads = Reshape (frequencies_of_heads, grid)
    twice = Concat <axis = -1> (angles_of_heads, angles_of_heads)  cos = Cos (twice)  sin = Sin (twice)  """
ODD = [
    (DIFFERENT + TURNED, "its tables may have different cosines or sines for the two elements of a pair"),
    (by_pairs(False, SLICED + "  c = Identity (a)").replace(", b)", ", c)"), "it leaves out some elements"),
    (BY_HEADS + TURNED, "its number of heads is dynamic"),
]


@pytest.mark.parametrize(("body", "why"), ODD, ids=[why for _, why in ODD])
def test_what_is_not_fused_says_why(tmp_path: Path, body: str, why: str) -> None:
    (outcome,) = fused(written(body), tmp_path).outcomes
    assert (outcome.operator, outcome.kind) == (None, "rotary") and (outcome.why or "").startswith(why)


NO_ROTATIONS = {
    "reflection": f"{twice(False)} {SLICED} {JOINED[False].format('b', 'a')} {SUM}",
    "no products": f"{SLICED}  low = Sub (a, b)  high = Add (b, a)  y = Concat <axis = -1> (low, high)",
}


@pytest.mark.parametrize("body", NO_ROTATIONS.values(), ids=NO_ROTATIONS)
def test_what_is_no_rotation(tmp_path: Path, body: str) -> None:
    """x cos + (b, a) sin, and a sum beside a difference, as in products of complex numbers."""
    assert fused(written(body), tmp_path).outcomes == ()


@pytest.mark.parametrize("by_pairs_alone", [True, False])
def test_tables_that_are_fed(tmp_path: Path, by_pairs_alone: bool) -> None:
    """The caller decides then if both numbers of a pair are equal. Tables with one number for a pair are fused."""
    columns = SIZE // 2 if by_pairs_alone else SIZE
    data, table = f"float[batch, {HEADS}, length, {SIZE}]", f"float[length, {columns}]"
    sums = BOTH.format("bc", "as") + JOINED[False].format("low", "high").replace("turned =", "y =")
    body = f"{SLICED} {sums}" if by_pairs_alone else TURNED
    text = f"rotate ({data} x, {table} cos, {table} sin) => ({data} y) {{ {BOUNDS.format(heads=1)} {body} }}"
    path = tmp_path / "model.onnx"
    onnx.save(onnx.parser.parse_model(f"{HEAD} {text}"), path)
    shapes = {"x": (2, HEADS, 3, SIZE), "cos": (3, columns), "sin": (3, columns)}
    analysis = analyze(path, AskedShapes(shapes), 1)
    (outcome,) = fuse(analysis.graph, analysis.shapes, analysis.costs.bound, ANY).outcomes
    assert (outcome.operator is not None) == by_pairs_alone
    assert outcome.why == (None if by_pairs_alone else ODD[0][1])


@pytest.mark.parametrize("mode", ["layer", "tensor"])
def test_package_of_a_fused_model_gives_what_the_unfused_one_does(
    tmp_path: Path, mode: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With gains as on GPUs, for a model whose projections before and after are sharded by heads."""
    path = tmp_path / "model.onnx"
    onnx.save(decoder_like(), path)
    monkeypatch.setattr("splitc.compiler.modes.asked.gains_of", lambda engine, devices: ANY)
    random = np.random.default_rng(1)
    inputs: dict[str, np.ndarray] = {"x": random.standard_normal((2, 5, 32), np.float32)}
    inputs["positions"] = random.integers(0, 9, (2, 5))
    shapes = {name: array.shape for name, array in inputs.items()}
    plan = plan_model(path, ["2xcpu"], Request(split_mode=mode, shapes=shapes, spread=True))
    assert [outcome.operator for outcome in plan.analysis.outcomes] == ["RotaryEmbedding"] * 2
    compile_model(plan, tmp_path / "package", verify=False)
    with Session(tmp_path / "package") as session:
        for more in ([(0, 0), (0, 3)], [(0, 2), (0, 0)]):  # the operator would take the first ones
            odd = {**inputs, "positions": np.pad(inputs["positions"], more)}
            with pytest.raises(ERRORS):
                run(onnx.load(path), odd)
            with pytest.raises(FeedError, match=r"'[bl]' is .* in the input 'x' and .* in 'positions': this package"):
                session.run(odd)
        np.testing.assert_allclose(session.run(inputs)["y"], run(onnx.load(path), inputs), rtol=0, atol=1e-5)


def decoder_like() -> onnx.ModelProto:
    """Two blocks: a projection, rotated heads, and a projection back."""
    layer = """
        rows{n} = MatMul (h{n}, w{n})  cut{n} = Reshape (rows{n}, by_heads)
        data{n} = Transpose <perm = [0, 2, 1, 3]> (cut{n})
        {rotated}
        back{n} = Transpose <perm = [0, 2, 1, 3]> (y{n})  flat{n} = Reshape (back{n}, by_rows)
        out{n} = MatMul (flat{n}, v{n})  h{m} = Add (h{n}, out{n})
    """
    rotated = f"{SLICED}  opposite = Neg (b)  {JOINED[False].format('opposite', 'a')} {SUM}"
    names = ("turned", "opposite", "straight", "crossed", "y", "a", "b")
    body = ""
    for n in range(2):
        own = rotated.replace("(x,", f"(data{n},")
        for name in names:
            own = own.replace(f"{name} =", f"{name}{n} =").replace(f"({name},", f"({name}{n},")
            own = own.replace(f"({name})", f"({name}{n})").replace(f", {name})", f", {name}{n})")
        body += layer.format(n=n, m=n + 1, rotated=own)
    weights = "".join(f", float[32, 32] {kind}{n}" for n in range(2) for kind in "wv")
    signature = f"g (float[b, l, 32] x, int64[b, l] positions{weights}) => (float[b, l, 32] y)"
    shapes = "by_heads = Constant <value_ints = [0, 0, 4, 8]> ()  by_rows = Constant <value_ints = [0, 0, 32]> ()"
    text = f"{HEAD} {signature} {{ {BOUNDS.format(heads=1)} {shapes} {ANGLES['fed']} {twice(False)} h0 = Identity (x)"
    model = onnx.parser.parse_model(f"{text} {body} y = Identity (h2) }}")
    random = np.random.default_rng(2)
    for value in [value for value in model.graph.input if value.name[0] in "wv"]:
        array = random.standard_normal((32, 32), np.float32) / 6
        model.graph.initializer.append(onnx.numpy_helper.from_array(array, value.name))
        model.graph.input.remove(value)
    return model
