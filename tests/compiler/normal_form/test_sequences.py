"""Sequences of known parts become these parts, which are cut as any other values."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import pytest

from splitc.compiler import Request, compile_model, plan_model
from splitc.runtime import Session
from tests.conftest import assert_close, run_whole
from tests.helpers.blocks import Block, check_split, sharded
from tests.helpers.graphs import read_graph
from tests.helpers.operators import softmax

WriteModel = Callable[[str], Path]


def test_what_is_split_at_sizes_of_inputs_is_cut_as_before(tmp_path: Path) -> None:
    """Two streams of tokens are joined, and parted again by a sequence, as torch exports it without its optimizer."""
    b = Block()
    x, z = softmax(b, b.data("x", (5, 16))), softmax(b, b.data("z", (3, 16)))
    joined = b.op("Concat", x, z, axis=0)
    lengths = [b.op("Reshape", b.op("Squeeze", b.op("Shape", one, start=0, end=1)), b.ints(-1)) for one in (x, z)]
    parts = b.op("SplitToSequence", b.op("MatMul", joined, b.w("A", 16, 32)), b.op("Concat", *lengths, axis=0), axis=0)
    first = b.op("SequenceAt", parts, b.constant(0, np.int64))
    last = b.op("SequenceAt", parts, b.constant(-1, np.int64))
    total = b.op("MatMul", b.op("Concat", b.op("Relu", last), first, axis=0), b.w("B", 32, 16))
    b.give(softmax(b, total), shape=[8, 16])
    for plan in check_split(b, tmp_path, ["A", "B"]):
        assert sharded(plan).sums.count == 1


@pytest.mark.parametrize("is_unbound", [False, True])
def test_equal_parts_are_cut(tmp_path: Path, is_unbound: bool) -> None:
    """A product in three parts: as torch exports chunk and unbind without its optimizer."""
    b = Block()
    product = b.op("MatMul", softmax(b, b.data("x", (5, 16))), b.w("A", 16, 96))
    if is_unbound:
        parts = b.op("SplitToSequence", b.op("Reshape", product, b.ints(5, 3, 32)), axis=1, keepdims=0)
    else:
        parts = b.op("SplitToSequence", product, b.constant(32, np.int64), axis=-1)
    gate, shift, value = (b.op("SequenceAt", parts, b.constant(place, np.int64)) for place in (0, 1, -1))
    total = b.op("MatMul", b.op("Add", b.op("Mul", b.op("Sigmoid", gate), value), shift), b.w("B", 32, 16))
    b.give(softmax(b, total), shape=[5, 16])
    for plan in check_split(b, tmp_path, ["A", "B"]):
        assert sharded(plan).sums.count == 1


@pytest.mark.parametrize("axis", [0, -1])
@pytest.mark.parametrize("opset", [11, 17])
def test_stacked_parts_are_cut(tmp_path: Path, axis: int, opset: int) -> None:
    """Outputs of layers, or of steps, that a scripted module lists."""
    b = Block(opset=opset)
    product = b.op("Relu", b.op("MatMul", softmax(b, b.data("x", (5, 16))), b.w("A", 16, 96)))
    parts = b.op("SequenceConstruct", product, b.op("Sigmoid", product), product)
    stacked = b.op("ConcatFromSequence", parts, axis=axis, new_axis=1)
    mixed = b.op("MatMul", stacked, b.w("C", 3, 1)) if axis else b.op("ReduceMean", stacked, axes=[0], keepdims=0)
    last = b.op("Reshape", mixed, b.ints(5, 96))
    b.give(softmax(b, b.op("MatMul", last, b.w("B", 96, 16))), shape=[5, 16])
    for plan in check_split(b, tmp_path, ["A", "B"]):
        assert sharded(plan).sums.count == 1


@pytest.mark.parametrize(
    ("made", "operators"),
    [
        ("s = SequenceConstruct (x, y)  z = SequenceAt (s, last)  r = Neg (z)", ["Neg"]),
        ("s = SequenceConstruct (x, y)  z = ConcatFromSequence <axis = 1> (s)  r = Neg (z)", ["Concat", "Neg"]),
        (
            "s = SequenceConstruct (x, y)  z = ConcatFromSequence <axis = 1, new_axis = 1> (s)  r = Neg (z)",
            ["Unsqueeze", "Unsqueeze", "Concat", "Neg"],
        ),
        (
            "e = SequenceEmpty ()  a = SequenceInsert (e, x)  s = SequenceInsert (a, y)"
            "  z = SequenceAt (s, last)  r = Abs (z)",
            ["Abs"],
        ),
        (
            "a = SequenceConstruct (x)  s = SequenceInsert (a, y, last)  z = SequenceAt (s, last)  r = Abs (z)",
            ["Abs"],
        ),
        (
            "a = SequenceConstruct (x)  s = SequenceInsert (a, y, place)  z = SequenceAt (s, last)  r = Abs (z)",
            ["SequenceConstruct", "SequenceInsert", "SequenceAt", "Abs"],
        ),
        ("s = SplitToSequence <axis = 1> (x, sizes)  z = SequenceAt (s, last)  r = Neg (z)", ["Split", "Neg"]),
        ("s = SplitToSequence <axis = 1> (x, three)  z = SequenceAt (s, last)  r = Neg (z)", ["Split", "Neg"]),
        (
            "s = SplitToSequence <axis = 1, keepdims = 0> (x)  z = SequenceAt (s, last)  r = Neg (z)",
            ["Gather", "Neg"],
        ),
        (
            "s = SplitToSequence <axis = 1> (x, chosen)  z = SequenceAt (s, last)  r = Neg (z)",
            ["SplitToSequence", "SequenceAt", "Neg"],
        ),
        (
            "s = SequenceConstruct (x, y)  z = SequenceAt (s, chosen)  r = Neg (z)",
            ["SequenceConstruct", "SequenceAt", "Neg"],
        ),
        (
            "s = SplitToSequence <axis = 1> (x)  z = SequenceAt (s, last)  r = Neg (z)",
            ["SplitToSequence", "SequenceAt", "Neg"],
        ),
        (
            "s = SplitToSequence <axis = 1> (w, three)  z = SequenceAt (s, last)  r = Neg (z)",
            ["SplitToSequence", "SequenceAt", "Neg"],
        ),
        (
            "s = SplitToSequence <axis = 1> (x, given)  z = SequenceAt (s, last)  r = Neg (z)",
            ["SplitToSequence", "SequenceAt", "Neg"],
        ),
        (
            "s = SplitToSequence <axis = 1> (x, sizes)  z = SequenceAt (s, place)  r = Neg (z)",
            ["SplitToSequence", "SequenceAt", "Neg"],
        ),
    ],
)
def test_only_known_parts_are_taken(write_model: WriteModel, made: str, operators: list[str]) -> None:
    graph = read_graph(
        write_model(
            f"""<ir_version: 8, opset_import: ["" : 17]>
            g (float[2, 4] x, float[2, 4] y, float[2, k] w, int64[n] given, int64 place, int64 chosen)
            => (float r)
            <int64 chosen = {{1}}, int64 last = {{-1}}, int64 three = {{3}}, int64[2] sizes = {{1, 3}}> {{ {made} }}"""
        )
    )
    assert [node.op_type for node in graph.nodes if node.op_type != "Constant"] == operators


def test_before_opset_13_sizes_are_no_input(write_model: WriteModel) -> None:
    graph = read_graph(
        write_model(
            """<ir_version: 8, opset_import: ["" : 12]>
            g (float[2, 4] x) => (float[2, 3] r) <int64 last = {-1}, int64[2] sizes = {1, 3}> {
              s = SplitToSequence <axis = 1> (x, sizes)
              z = SequenceAt (s, last)
              r = Neg (z)
            }"""
        )
    )
    assert [node.op_type for node in graph.nodes] == ["SplitToSequence", "SequenceAt", "Neg"]


@pytest.mark.parametrize(
    ("made", "operators"),
    [
        ("o = Optional (x)  z = OptionalGetElement (o)  r = Neg (z)", ["Neg"]),
        (
            "s = SequenceConstruct (x, y)  o = Optional (s)  p = OptionalGetElement (o)"
            "  z = SequenceAt (p, last)  r = Neg (z)",
            ["Neg"],
        ),
        (
            """o = Optional (x)  b = OptionalHasElement (o)
            r = If (b) <then_branch = yes () => (float[2, 4] s) { s = Abs (x) },
                        else_branch = no () => (float[2, 4] t) { t = Neg (x) }>""",
            ["If"],
        ),
        ("o = Optional (x)  r = OptionalGetElement (o)", ["Optional", "OptionalGetElement"]),
    ],
)
def test_optional_values_are_what_they_hold(write_model: WriteModel, made: str, operators: list[str]) -> None:
    path = write_model(
        f"""<ir_version: 8, opset_import: ["" : 17]>
        g (float[2, 4] x, float[2, 4] y) => (float[2, 4] r) <int64 last = {{-1}}> {{ {made} }}"""
    )
    assert [node.op_type for node in read_graph(path).nodes] == operators


LOOPED = """<ir_version: 8, opset_import: ["" : 17]>
g (float[n, 16] x, int64 count) => (float[n, 16] y) <float[16, 16] w> {{
    z = MatMul (x, w)
    {body}
}}"""
LOOP = """
    bent = Loop <body = body (int64 i, bool going, float[n, 16] h) => (bool goes_on, float[n, 16] after) {
        goes_on = Identity (going)  after = Tanh (h)
    }> (count, , z)
"""
MAPPED = f"""{LOOP}
    parts = SequenceConstruct (bent, bent)
    mapped = SequenceMap <body = each (float[n, 16] part) => (float[n, 16] made) {{ made = Relu (part) }}> (parts)
    one = Constant <value_int = 1> ()  y = SequenceAt (mapped, one)
"""
IN_A_BRANCH = f"""
    zero = Constant <value_int = 0> ()  many = Greater (count, zero)
    y = If <else_branch = none () => (float[n, 16] same) {{ same = Identity (z) }},
            then_branch = some () => (float[n, 16] joined) {{ {LOOP}
                half = Constant <value_int = 8> ()  parts = SplitToSequence <axis = 1> (bent, half)
                joined = ConcatFromSequence <axis = 1> (parts)
            }}> (many)
"""


@pytest.mark.parametrize("body", [MAPPED, IN_A_BRANCH], ids=["mapped", "in a branch"])
def test_sequences_of_what_loops_make(body: str, write_model: WriteModel, tmp_path: Path) -> None:
    """Their elements' type is not known while shapes are inferred. It was written to a file, which failed."""
    model = onnx.load(write_model(LOOPED.format(body=body)))
    w = np.random.default_rng(0).standard_normal((16, 16), np.float32)
    model.graph.initializer.append(onnx.numpy_helper.from_array(w, "w"))
    onnx.save(model, tmp_path / "model.onnx")
    plan = plan_model(tmp_path / "model.onnx", ["cpu0"], Request(shapes={"x": (3, 16)}))
    compile_model(plan, tmp_path / "package", verify=False)
    with Session(tmp_path / "package") as session:
        for count in (0, 1, 3):
            feeds = {"x": w[: count + 1], "count": np.array(count)}
            assert_close(session.run(feeds), run_whole(tmp_path / "model.onnx", feeds))


MAP = """<ir_version: 9, opset_import: ["" : 18]>
g (float[n, 16] x) => (float[n, 16] y) <float[16, 1024] w, float[1024, 16] v> {{
    z = Softmax (x)  other = Tanh (x)  {parts}
    mapped, more = SequenceMap <body = each (float[n, k] part, float[n, 16] one)
      => (float[n, 16] made, float[n, 16] same) {{
        inner = MatMul (part, w)  bent = Relu (inner)  outer = MatMul (bent, v)  made = Add (outer, one)
        same = Identity (one)
    }}> ({read})
    first = Constant <value_int = 0> ()  last = Constant <value_int = -1> ()
    a = SequenceAt (mapped, first)  b = SequenceAt (mapped, last)  c = SequenceAt (more, last)
    sum = Sub (a, b)  y = Mul (sum, c)
}}"""
SPLIT = """long = Concat <axis = 1> (z, other)
    size = Constant <value_int = 16> ()  s = SplitToSequence <axis = 1> (long, size)"""


@pytest.mark.parametrize(
    ("parts", "read"),
    [
        ("s = SequenceConstruct (z, other, z)", "s, z"),
        ("s = SequenceConstruct (z, other)  t = SequenceConstruct (other, z)", "s, t"),
        (SPLIT, "s, other"),
    ],
)
def test_bodies_of_maps_are_split(parts: str, read: str, write_model: WriteModel, tmp_path: Path) -> None:
    model, b = onnx.load(write_model(MAP.format(parts=parts, read=read))), Block()
    for name, shape in (("w", (16, 1024)), ("v", (1024, 16))):
        model.graph.initializer.append(onnx.numpy_helper.from_array(b.random(name, *shape), name))
    model = onnx.shape_inference.infer_shapes(model)
    onnx.save(model, tmp_path / "model.onnx")
    request = Request(split_mode="tensor", shapes={"x": (3, 16)}, memory=["1GiB"])
    plan = plan_model(tmp_path / "model.onnx", "2xcpu", request)
    assert {weight.name for weight in plan.weights if weight.split} == {"w", "v"}
    compile_model(plan, tmp_path / "package", verify=False)
    with Session(tmp_path / "package") as session:
        for rows in (1, 3):
            feeds = {"x": b.random("x", rows, 16)}
            assert_close(session.run(feeds), run_whole(tmp_path / "model.onnx", feeds), 1e-4)
