"""Sizes that are the same in all requests are constants of the graph, and so is what follows from them."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import onnx_ir as ir
import pytest

from splitc.compiler import Request, compile_model, plan_model
from splitc.compiler.analysis.facts import analyze
from splitc.compiler.fusion.fuse import Fused, fuse
from splitc.compiler.inference.shapes import infer_shapes, symbols_in
from splitc.compiler.patterns.kernels import Gains
from splitc.compiler.request.shapes import AskedShapes
from splitc.runtime import Session
from tests.conftest import LAYER, assert_close, run_whole
from tests.helpers.graphs import read_graph
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


# Both halves of the columns, as torch's older exporter writes chunk(2, -1): {view} gives the shape whose last size is
# halved.
HALVED = """<ir_version: 8, opset_import: ["" : 17]>
    halved (float[b, l, 8] x) => (float[b, l, 4] y)
    <int64[1] axis = {{2}}, int64[1] zero = {{0}}, int64[1] one = {{1}}, int64[1] two = {{2}},
     int64[1] none = {{-1}}, int64[1] eight = {{8}}, int64[3] ones3 = {{1, 1, 1}},
     int64 three = {{3}}, float number = {{1.5}}> {{
        {view}
        sizes = Shape (data)  size = Gather (sizes, axis)  more = Add (size, one)  half = Div (more, two)
        end = Mul (half, two)  left = Slice (data, zero, half, axis)  right = Slice (data, half, end, axis)
        y = Mul (left, right) }}"""
VIEWS = {
    "declared": "data = Identity (x)",
    # A size of -1 that is the same for all inputs.
    "reshaped": """given = Shape (x)  batch = Gather (given, zero)  length = Gather (given, one)
        shape = Concat <axis = 0> (batch, length, none)  flat = Reshape (x, shape)  data = Relu (flat)""",
    # As that exporter writes x.expand(b, l, -1).
    "expanded": """given = Shape (x)  count = Shape (given)  ones = ConstantOfShape <value = int64[1] {1}> (count)
        negative = Mul (ones, none)  unknown = Equal (given, negative)  shape = Where (unknown, ones, given)
        data = Expand (number, shape)""",
    # The same, of sizes that are computed.
    "expanded to computed sizes": """given = Shape (x)  batch = Gather (given, zero)  length = Gather (given, one)
        longer = Add (length, two)  double = Mul (longer, two)  most = Max (double, batch)
        list = Concat <axis = 0> (most, none, eight)  positive = Mul (ones3, none)  unknown = Equal (list, positive)
        shape = Where (unknown, ones3, list)  data = Expand (number, shape)""",
    # As that exporter writes x.repeat_interleave(l, 1).
    "repeated": """given = Shape (x)  length = Gather (given, one)  choice = Concat <axis = 0> (one, length)
        picked = OneHot <axis = 1> (one, three, choice)  times = Reshape (picked, none)  data = Tile (x, times)""",
    "filled": "given = Shape (x)  zeros = ConstantOfShape (given)  data = Add (x, zeros)",
}


@pytest.mark.parametrize("view", VIEWS.values(), ids=VIEWS)
def test_arithmetic_on_fixed_sizes_is_folded(tmp_path: Path, view: str) -> None:
    onnx.save(onnx.parser.parse_model(HALVED.format(view=view)), tmp_path / "model.onnx")
    names = operators(analyze(tmp_path / "model.onnx", AskedShapes(), 1).graph.graph)
    assert not {"Div", "Gather"} & set(names[names.index("Slice") - 2 :])
    compile_model(plan_model(tmp_path / "model.onnx", ["cpu0"], LAYER), tmp_path / "package")
    with Session(tmp_path / "package") as session:
        for sizes in ((1, 1, 8), (2, 3, 8)):
            request = {"x": np.random.default_rng(1).standard_normal(sizes).astype(np.float32)}
            assert_close(session.run(request), run_whole(tmp_path / "model.onnx", request))


@pytest.mark.parametrize("given", ["Sub (sizes, less)", "Add (sizes, negative)", "Mul (sizes, negative)"])
def test_a_difference_of_sizes_may_be_negative(tmp_path: Path, given: str) -> None:
    text = f"""<ir_version: 8, opset_import: ["" : 17]>
        g (float[n, m] x) => (float[k, l] y)
        <int64[2] ones = {{1, 1}}, int64[2] negative = {{-1, -1}}, int64[2] less = {{2, 0}}, float number = {{2}}> {{
            sizes = Shape (x)  given = {given}  unknown = Equal (given, negative)
            shape = Where (unknown, ones, given)  y = Expand (number, shape) }}"""
    onnx.save(onnx.parser.parse_model(text), tmp_path / "model.onnx")
    graph = read_graph(tmp_path / "model.onnx")
    infer_shapes(graph.model, folds=True)
    (made,) = graph.graph.outputs
    assert made.shape is not None
    assert not {"n", "m"} & {name for size in made.shape for name in symbols_in(size)}


def test_a_size_that_may_be_minus_one_is_not_taken_for_a_length(tmp_path: Path) -> None:
    """`given` is not a size: where it is -1, the model takes 1."""
    text = """<ir_version: 8, opset_import: ["" : 17]>
        g (float[n, 1] x, int64[2] given) => (float[n, m] y) <int64[2] ones = {1, 1}, int64[2] negative = {-1, -1}> {
            unknown = Equal (given, negative)  shape = Where (unknown, ones, given)  y = Expand (x, shape) }"""
    onnx.save(onnx.parser.parse_model(text), tmp_path / "model.onnx")
    compile_model(plan_model(tmp_path / "model.onnx", ["cpu0"], LAYER), tmp_path / "package")
    with Session(tmp_path / "package") as session:
        for given in ([-1, 3], [2, -1], [2, 2]):
            request = {"x": np.ones((2, 1), np.float32), "given": np.array(given)}
            assert_close(session.run(request), run_whole(tmp_path / "model.onnx", request))


# As torch's older exporter writes squeeze(1) of an axis whose size it does not know: it asks for the size first. All
# branches use one name; {size} is the size of the input's second axis.
CHOSEN = """<ir_version: 8, opset_import: ["" : 17]>
    chosen (float[n, {size}, 8] x) => (float[n, 6] y)
    <int64 place = {{1}}, int64 one = {{1}}, int64[1] axes = {{1}}, int64[2] flat = {{0, -1}}> {{
        product = MatMul (x, w1)  sizes = Shape (product)  size = Gather (sizes, place)  single = Equal (size, one)
        row = If (single) <
            then_branch = yes () => (float[a, b] z) {{ inner = Neg (product)  z = Squeeze (inner, axes) }},
            else_branch = no () => (float[a, b] z) {{ inner = Abs (product)  z = Reshape (inner, flat) }}
        >
        again = If (single) <
            then_branch = yes () => (float[a, b] z) {{ inner = Exp (row)  z = Identity (inner) }},
            else_branch = no () => (float[a, b] z) {{ inner = Sin (row)  z = Identity (inner) }}
        >
        y = MatMul (again, w2) }}"""


@pytest.mark.parametrize(
    ("size", "left", "mode"),
    [("1", 0, "layer"), ("1", 0, "tensor"), ("m", 2, "layer")],
    ids=["layer", "tensor", "open"],
)
def test_a_branch_that_a_fixed_size_chooses_is_taken(size: str, left: int, mode: str, tmp_path: Path) -> None:
    path = tmp_path / "model.onnx"
    model = onnx.parser.parse_model(CHOSEN.format(size=size))
    random = np.random.default_rng(0)
    for name, shape in {"w1": (8, 8), "w2": (8, 6)}.items():
        array = random.standard_normal(shape).astype(np.float32)
        model.graph.initializer.append(onnx.numpy_helper.from_array(array, name))
    onnx.save(model, path)
    plan = plan_model(path, ["2xcpu"], Request(split_mode=mode, spread=True, shapes={"x": (2, 1, 8)}))
    assert sum(node.op_type == "If" for node in plan.analysis.graph.nodes) == left
    compile_model(plan, tmp_path / "package")
    with Session(tmp_path / "package") as session:
        for rows in (2, 5):
            request = {"x": random.standard_normal((rows, 1, 8)).astype(np.float32)}
            assert_close(session.run(request), run_whole(path, request))


# The sides of its image are halved and doubled again, as in a U-Net, so that they must be even.
HALVED_IMAGE = """<ir_version: 8, opset_import: ["" : 17]>
    halved (float[n, 2, h, w] x) => (float[n, 4, h, w] y) <float[4] doubled = {1, 1, 2, 2}> {
        half = MaxPool <kernel_shape = [2, 2], strides = [2, 2]> (x)
        large = Resize <mode = "nearest"> (half, , doubled)  y = Concat <axis = 1> (x, large) }"""


def test_an_image_whose_side_is_named_by_a_number(tmp_path: Path) -> None:
    """The name is no size: with 3 the model would not run."""
    model = onnx.parser.parse_model(HALVED_IMAGE)
    for value in (*model.graph.input, *model.graph.output):
        value.type.tensor_type.shape.dim[3].dim_param = "3"
    onnx.save(model, tmp_path / "model.onnx")
    analysis = analyze(tmp_path / "model.onnx", AskedShapes(), 1)
    assert analysis.fitted.problem is None and analysis.shapes["x"][3] != 3


def test_sizes_are_picked_along_the_axis_that_is_asked(tmp_path: Path) -> None:
    text = """<ir_version: 8, opset_import: ["" : 17]>
        g (float[n, m] x) => (float[a, b, c, d] y)
        <int64[2] places = {0, 0}, int64 two = {2}, int64[1] all = {-1}, float number = {2}> {
            sizes = Shape (x)  picked = OneHot <axis = 0> (places, two, sizes)  shape = Reshape (picked, all)
            y = Expand (number, shape) }"""
    onnx.save(onnx.parser.parse_model(text), tmp_path / "model.onnx")
    graph = read_graph(tmp_path / "model.onnx")
    infer_shapes(graph.model, folds=True)
    (made,) = graph.graph.outputs
    assert str(made.shape) == "[m,m,n,n]"
