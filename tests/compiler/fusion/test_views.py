"""Consecutive views are merged if their sizes allow it, with the same numbers."""

from __future__ import annotations

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime as ort
import pytest

from splitc.compiler.fusion.views import join_views
from splitc.compiler.graphs.editor import Editor
from splitc.compiler.graphs.unused import remove_unused
from splitc.compiler.inference.shapes import infer_shapes
from splitc.compiler.patterns.sizes import Axis, Sizes
from splitc.compiler.request.shapes import Shape

MODEL = """<ir_version: 8, opset_import: ["" : 18]>
graph (float[b, s, 8] x) => (float{axes} y{output}) {{
    heads = Constant <value_ints = {heads}> ()  again = Constant <value_ints = {again}> ()
    h = Reshape (x, heads)  v = Reshape (h, again)  y = Neg (v)
}}"""
# Those of x.
SIZES = {"planned": (2, 3, 8), "probe": (5, 7, 8)}


def views(heads: list[int], again: list[int], output: str = "") -> tuple[ir.Model, ir.Model]:
    """The model before and after its views are merged."""
    axes = str([f"n{place}" for place in range(len(again))]).replace("'", "")
    text = MODEL.format(heads=heads, again=again, axes=axes, output=output and f", float{axes} {output}")
    shapes = {}
    for name, own in SIZES.items():
        x = np.zeros(own, np.float32)
        h = x.reshape([size or own[place] for place, size in enumerate(heads)])
        v = h.reshape([size or h.shape[place] for place, size in enumerate(again)])
        shapes[name] = {"x": x.shape, "h": h.shape, "v": v.shape, "y": v.shape}
    before, after = (ir.from_proto(onnx.parser.parse_model(text)) for _ in range(2))
    infer_shapes(after)
    for node in [node for node in after.graph if node.op_type == "Constant"]:
        numbers = np.array(node.attributes["value_ints"].as_ints(), np.int64)
        node.outputs[0].const_value = ir.tensor(numbers, name=node.outputs[0].name)
    join_views(Editor(after.graph), Sizes(shapes["planned"], shapes["probe"], True))
    remove_unused(after.graph)
    return before, after


@pytest.mark.parametrize(
    ("heads", "again", "left"),
    [
        ([0, 0, 2, 4], [0, 0, 8], 0),  # as it was
        ([0, 0, 2, 4], [1, -1, 8], 1),
        ([0, 0, 2, 4], [0, -1], 1),
        ([1, -1, 8], [0, 0, 2, 4], 2),  # two sizes that only the first view has
        ([1, -1, 8], [0, -1, 4], 2),  # one that is 1 there, beside another
        ([-1, 4], [0, 1, 4], 1),  # one such size, which a Reshape finds by itself
        ([0, -1], [0, 2, -1], 1),
    ],
)
def test_views_read_what_is_below(heads: list[int], again: list[int], left: int) -> None:
    before, after = views(heads, again)
    assert sum(node.op_type == "Reshape" for node in after.graph) == left
    for shape in ((2, 3, 8), (4, 2, 8), (1, 1, 8), *([(0, 3, 8)] if -1 not in again else [])):
        x = np.random.default_rng(0).standard_normal(shape).astype(np.float32)
        one, other = (
            ort.InferenceSession(ir.to_proto(model).SerializeToString()).run(["y"], {"x": x})[0]
            for model in (before, after)
        )
        np.testing.assert_array_equal(one, other)


def test_outputs_stay() -> None:
    _, after = views([0, 0, 2, 4], [0, 0, 8], "v")
    assert sum(node.op_type == "Reshape" for node in after.graph) == 1


KEPT = """<ir_version: 8, opset_import: ["" : 18]>
graph (float[b, s, 8] x, float[c, t, 8] z) => (float[n0, n1, n2] y)
<int64[1] zero = {{0}}, int64[1] one = {{1}}, int64[1] eight = {{8}}, int64[1] last = {{-1}}, int64[1] least = {{-100}},
 int64[1] most = {{9223372036854775807}}, int64[1] many = {{1000}}> {{
    sizes = Shape (x)  length = Gather <axis = 0> (sizes, one)  twice = Add (length, length)
    others = Shape (z)  other = Gather <axis = 0> (others, one)
    fewer = Sub (twice, length)  some = Min (length, many)  enough = Max (sizes, one)
    v = {node}  y = Neg (v)
}}"""


@pytest.mark.parametrize(
    ("node", "stays"),
    [
        ("Slice (x, zero, length, one)", False),
        ("Slice (x, zero, fewer, one)", False),
        ("Slice (x, zero, most, one, one)", False),
        ("Slice (x, zero, eight, last)", False),
        ("Expand (x, sizes)", False),
        ("Reshape (x, sizes)", False),
        ("Slice (x, zero, twice, one)", True),  # the axis may be longer, in requests of other sizes
        ("Slice (x, zero, some, one)", True),  # not all of 2000
        ("Slice (x, zero, many, one)", True),
        ("Slice (x, least, most, one)", True),
        ("Slice (x, last, least, one, last)", True),  # the other way round
        ("Expand (x, enough)", True),  # one, of none
        ("Slice (x, zero, other, one)", True),  # as long only by chance, as a mask and the keys that it is cut to
        ("Expand (x, others)", True),
        ("Reshape (x, others)", True),
    ],
)
def test_what_keeps_its_input_for_all_sizes_is_dropped(node: str, stays: bool) -> None:
    model = ir.from_proto(onnx.parser.parse_model(KEPT.format(node=node)))
    infer_shapes(model)
    shapes: dict[str, dict[str, Shape]] = {name: dict.fromkeys("xzvy", own) for name, own in SIZES.items()}
    join_views(Editor(model.graph), Sizes(shapes["planned"], shapes["probe"], True))
    remove_unused(model.graph)
    assert (len(model.graph) > 1) == stays


@pytest.mark.parametrize(
    ("one", "other", "apart"),
    [
        ("batch", "rows", True),
        ("hidden_dim", "rows", True),
        ("batch", "batch", False),
        ("batch", "_d0", False),
        ("2*_d3 + 1", "rows", False),
    ],
)
def test_names_that_inference_made_up_do_not_tell_axes_apart(one: str, other: str, apart: bool) -> None:
    axes = [Axis((2, 2), ir.SymbolicDim(name)) for name in (one, other)]
    assert axes[0].is_apart(axes[1]) == axes[1].is_apart(axes[0]) == apart


@pytest.mark.parametrize(
    ("slices", "dropped"),
    [
        ("a = Slice (x, zero, two, one)  b = Slice (x, two, end, one)  c = Concat <axis = 1> (a, b)", True),
        ("a = Slice (x, zero, two, last)  b = Slice (x, two, eight, last)  c = Concat <axis = -1> (a, b)", True),
        ("a = Slice (x, zero, two, one)  b = Slice (x, two, end, one)  c = Concat <axis = 1> (b, a)", False),
        ("a = Slice (x, zero, two, one)  b = Slice (x, two, eight, one)  c = Concat <axis = 1> (a, b)", False),
        ("a = Slice (x, zero, two, one)  b = Slice (x, one, end, one)  c = Concat <axis = 1> (a, b)", False),
        ("a = Slice (x, zero, two, one)  b = Slice (x, two, end, one, two)  c = Concat <axis = 1> (a, b)", False),
        ("n = Neg (x) a = Slice (x, zero, two, one)  b = Slice (n, two, end, one) c = Concat <axis = 1> (a, b)", False),
        ("a = Slice (x, zero, t, one)  b = Slice (x, t, end, one)  c = Concat <axis = 1> (a, b)", True),
        ("a = Slice (x, zero, t, one)  b = Slice (x, t, s, one)  c = Concat <axis = 1> (a, b)", True),
        ("a = Slice (x, zero, t, one)  b = Slice (x, s, end, one)  c = Concat <axis = 1> (a, b)", False),
        (
            "k = Abs (t)  a = Slice (x, zero, two, one, k)  b = Slice (x, two, end, one, k)"
            "  c = Concat <axis = 1> (a, b)",
            False,
        ),
        (
            "a = Slice (x, zero, t, one)  b = Slice (x, t, two, one)  d = Slice (x, two, end, one)"
            "  c = Concat <axis = 1> (a, b, d)",
            False,
        ),
    ],
    ids=[
        "to any end",
        "to the known end",
        "turned",
        "a part",
        "overlap",
        "every second",
        "of two values",
        "at a computed size",
        "to a computed end",
        "at two computed sizes",
        "by a computed step",
        "parts that may overlap",
    ],
)
def test_parts_that_are_joined_again_are_the_value(slices: str, dropped: bool) -> None:
    lists = {"zero": [0], "one": [1], "two": [2], "last": [-1], "eight": [8], "end": [(1 << 63) - 1]}
    constants = "  ".join(f"{name} = Constant <value_ints = {numbers}> ()" for name, numbers in lists.items())
    sizes = "t = Shape <start = 0, end = 1> (z)  s = Shape <start = 1, end = 2> (x)"
    text = '<ir_version: 8, opset_import: ["" : 18]> g (float[b, s, 8] x, float[t] z) => (float[b, m, u] y)'
    model = ir.from_proto(onnx.parser.parse_model(f"{text} {{ {constants} {sizes} {slices}  y = Neg (c) }}"))
    infer_shapes(model)
    for node in [node for node in model.graph if node.op_type == "Constant"]:
        numbers = np.array(node.attributes["value_ints"].as_ints(), np.int64)
        node.outputs[0].const_value = ir.tensor(numbers, name=node.outputs[0].name)
    shapes: dict[str, dict[str, Shape]] = {name: {"x": own, "n": own, "z": own[:1]} for name, own in SIZES.items()}
    join_views(Editor(model.graph), Sizes(shapes["planned"], shapes["probe"], True))
    remove_unused(model.graph)
    assert ("Concat" not in [node.op_type for node in model.graph]) == dropped
