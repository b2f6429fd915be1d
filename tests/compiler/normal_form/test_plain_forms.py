"""Nodes become those that most exporters write, where the sizes say that these do the same."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import onnx_ir as ir
import pytest

from splitc.compiler.analysis.facts import analyze
from splitc.compiler.request.shapes import AskedShapes
from tests.conftest import assert_close, run_whole

WriteModel = Callable[[str], Path]
SIZES = "int64[1] none = {0}, int64[1] one = {1}, int64[1] last = {-1}, int64[1] end = {9223372036854775807}"
SHARED = f"{SIZES}, int64[3] back = {{0, 0, 1}}, float eight = {{8}}, float eighth = {{0.125}}, float near = {{0.12}}"
SLICES = "int64[3] zeros = {0, 0, 2}, int64[3] ends = {9223372036854775807, 9, 7}, int64[3] axes = {0, -2, 2}"

PLAIN = {
    "a mean": ("a = ReduceSum (x, last)  y = Div (a, eight)", "ReduceMean"),
    "a mean by a factor": ("a = ReduceSum <keepdims = 0> (x, last)  y = Mul (eighth, a)", "ReduceMean"),
    "a mean whose axis comes back": (
        "a = ReduceSum <keepdims = 0> (x, last)  b = Div (a, eight)  c = Reshape (b, back)  y = Neg (c)",
        "ReduceMean Neg",
    ),
    "a maximum whose axis comes back": (
        "a = ReduceMax <keepdims = 0> (x, last)  b = Unsqueeze (a, last)  y = Sub (x, b)",
        "ReduceMax Sub",
    ),
    "a root": ("a = Abs (x)  y = Pow (a, half)", "Abs Sqrt"),
    "a slice of one axis": ("y = Slice (x, zeros, ends, axes)", "Slice"),
    "a slice of all": ("a = Slice (x, none, full, last, one)  y = Neg (a)", "Neg"),
    "a range": ("y = Gather <axis = -1> (x, range)", "Slice"),
    "repeated heads": ("y = Gather <axis = -2> (x, twice)", "Expand Reshape"),
    "sizes of a transposed value": (
        "a = Transpose <perm = [1, 2, 0]> (x)  b = Shape <start = -2> (a)  y = Expand (eight, b)",
        "Shape Gather Expand",
    ),
    "a view that changes nothing": ("a = Shape (x)  b = Reshape (x, a)  y = Neg (b)", "Neg"),
    "views that change nothing": ("a = Flatten (x)  b = Unsqueeze (a, one)  c = Reshape (b, same)  y = Neg (c)", "Neg"),
    "the output of a view": ("a = Neg (x)  y = Reshape (a, same)", "Neg"),
    "a view that changes nothing, in numbers": ("b = Reshape (x, same)  y = Neg (b)", "Neg"),
    "a dense layer of joined rows": (
        "a = Reshape (x, rows)  b = MatMul (a, matrix)  c = Reshape (b, apart)  y = Neg (c)",
        "MatMul Neg",
    ),
    "an Expand without effect": ("a = Shape (x)  b = Expand (x, a)  y = Neg (b)", "Neg"),
    "an Expand to the sizes of the other factor": ("a = Shape (x)  b = Expand (eight, a)  y = Mul (b, x)", "Mul"),
    "scaling without effect": (
        "a = Mul (one_row, x)  b = Div (a, single)  c = Add (b, zero_row)  d = Sub (c, zero)  y = Neg (d)",
        "Neg",
    ),
    "a choice that is made": ("a = Neg (x)  y = Where (yes, a, x)", "Neg"),
    "a choice of the other": ("a = Neg (x)  y = Where (no, x, a)", "Neg"),
    "a Where by arithmetic": (
        "m = Greater (x, half)  a = Cast <to = 1> (m)  b = Mul (a, x)  n = Not (m)  c = Cast <to = 1> (n) "
        "d = Mul (eight, c)  y = Add (d, b)",
        "Greater Where",
    ),
    "a count in floats": (
        "a = Shape <end = 1> (x)  s = Squeeze (a)  b = Cast <to = 1> (s)  c = Range (zero, b, single)  y = Neg (c)",
        "Shape Squeeze Range Cast Neg",
    ),
    "a mean of squares": ("a = ReduceSumSquare (x, last)  y = Div (a, eight)", "Mul ReduceMean"),
    "a lookup by a column": ("a = Reshape (ids, column)  y = GatherND (x, a)", "Gather"),
    "a lookup": ("a = Unsqueeze (ids, last)  y = GatherND (x, a)", "Gather"),
}
STAY = {
    "another factor": ("a = ReduceSum (x, last)  y = Mul (near, a)", "ReduceSum Mul"),
    "a quotient the other way": ("a = ReduceSum (x, last)  y = Div (eight, a)", "ReduceSum Div"),
    "an axis of unknown size": ("a = ReduceSum (x, none)  y = Div (a, eight)", "ReduceSum Div"),
    "a sum with other readers": ("a = ReduceSum (x, last)  b = Div (a, eight)  y = Add (a, b)", "ReduceSum Div Add"),
    "another axis": ("a = ReduceMax <keepdims = 0> (x, last)  y = Unsqueeze (a, none)", "ReduceMax Unsqueeze"),
    "a dense layer whose rows are apart in another way": (
        "a = Reshape (x, rows)  b = MatMul (a, matrix)  c = Reshape (b, turned)  y = Neg (c)",
        "Reshape MatMul Reshape Neg",
    ),
    "a dense layer whose columns are parted": (
        "a = Reshape (x, pairs_of_4)  b = MatMul (a, small)  c = Reshape (b, same)  y = Neg (c)",
        "Reshape MatMul Reshape Neg",
    ),
    "a root of whole numbers": (
        "a = Cast <to = 6> (x)  b = Pow (a, half)  y = Cast <to = 1> (b)",
        "Cast Pow Cast",
    ),
    "an Expand that is read as it is": ("a = Shape (x)  y = Expand (eight, a)", "Shape Expand"),
    "an Expand of both factors": (
        "a = Shape (x)  b = Expand (eight, a)  c = Expand (near, a)  y = Add (b, c)",
        "Shape Expand Add",
    ),
    "a quotient of one": ("a = Div (single, x)  b = Sub (zero, a)  y = Abs (b)", "Div Sub Abs"),
    "a sum with one": ("y = Add (x, single)", "Add"),
    "a product with zero": ("y = Mul (zero_row, x)", "Mul"),
    "a product that gets an axis": ("a = Mul (x, more_axes)  y = Neg (a)", "Mul Neg"),
    "a choice for each element": ("y = Where (mixed, x, eight)", "Where"),
    "a Where by arithmetic with infinity": (
        "m = Greater (x, half)  a = Cast <to = 1> (m)  b = Mul (a, x)  n = Not (m)  c = Cast <to = 1> (n) "
        "d = Mul (lowest, c)  y = Add (d, b)",
        "Greater Cast Mul Not Cast Mul Add",
    ),
    "a count by halves": (
        "a = Shape <end = 1> (x)  s = Squeeze (a)  b = Cast <to = 1> (s)  c = Range (zero, b, half)  y = Neg (c)",
        "Shape Squeeze Cast Range Neg",
    ),
    "a choice of a number": ("y = Where (yes, eight, x)", "Where"),
    "another power": ("a = Abs (x)  y = Pow (a, eight)", "Abs Pow"),
    "a slice backwards": ("y = Slice (x, end, begin, last, last)", "Slice"),
    "all of an unknown axis": ("y = Slice (x, none, full, none, one)", "Slice"),
    "sizes of a value that is read": (
        "a = Transpose <perm = [1, 2, 0]> (x)  b = Shape (a)  c = Expand (eight, b)  y = Max (a, c)",
        "Transpose Shape Expand Max",
    ),
    "a view of other sizes": ("b = Reshape (x, other)  y = Neg (b)", "Reshape Neg"),
    "a range of an axis of unknown size": ("y = Gather <axis = 0> (x, range)", "Gather"),
    "heads in turn": ("y = Gather <axis = -2> (x, turns)", "Gather"),
    "a part of the heads": ("y = Gather <axis = -1> (x, twice)", "Gather"),
    "a range of an unknown axis": ("y = Gather (x, none)", "Gather"),
    "a lookup by two indices": ("a = Concat <axis = 1> (pairs, pairs)  y = GatherND (x, a)", "GatherND"),
}


@pytest.mark.parametrize(("nodes", "operators"), [*PLAIN.values(), *STAY.values()], ids=[*PLAIN, *STAY])
def test_a_node_is_written_plainly(nodes: str, operators: str, write_model: WriteModel, tmp_path: Path) -> None:
    """Its results are the same, also for another number of rows."""
    numbers = "int64[8] twice = {0, 0, 0, 0, 1, 1, 1, 1}, int64[4] turns = {0, 1, 0, 1}, float half = {0.5}"
    column = (
        "int64[2] column = {-1, 1}, int64[2] range = {1, 2}, int64[3] same = {-1, 2, 8}, int64[3] other = {-1, 8, 2}"
    )
    floats = "float zero = {0}, float single = {1}, float lowest = {-inf}"
    neutral = "float[1] one_row = {1}, float[1, 1] zero_row = {0}, float[1, 1, 1, 1] more_axes = {1}"
    flags = "bool yes = {1}, bool no = {0}, bool[8] mixed = {1, 0, 1, 1, 1, 1, 1, 1}"
    matrices = (
        "float[8, 3] matrix = {1, 2, 3, 4, 5, 6, 7, 8, 9, 1, 2, 3, 4, 5, 6, 7, 8, 9, 1, 2, 3, 4, 5, 6}, "
        "float[4, 4] small = {1, 2, 3, 4, 5, 6, 7, 8, 9, 1, 2, 3, 4, 5, 6, 7}, int64[2] rows = {-1, 8}, "
        "int64[3] apart = {-1, 2, 3}, int64[3] turned = {2, -1, 3}, int64[2] pairs_of_4 = {-1, 4}"
    )
    pairs = "int64[1] begin = {-9223372036854775807}, int64[1] full = {8}, int64[2, 1] pairs = {0, 1}"
    path = write_model(
        f"""<ir_version: 8, opset_import: ["" : 18]> g (float[n, 2, 8] x, int64[m] ids) => (float y)
        <{SHARED}, {SLICES}, {numbers}, {pairs}, {column}, {matrices}, {flags}, {floats}, {neutral}> {{ {nodes} }}"""
    )
    onnx.save(onnx.shape_inference.infer_shapes(onnx.load(path)), path)  # the file declares all shapes
    feeds = {"x": np.random.default_rng(0).standard_normal((3, 2, 8)).astype(np.float32), "ids": np.array([2, 0, 1])}
    analysis = analyze(path, AskedShapes({name: array.shape for name, array in feeds.items()}), 1)
    for value in (value for node in analysis.graph.nodes for value in node.outputs):
        assert value.shape is not None and len(value.shape) == len(analysis.costs.bound.shapes[value.name or ""])
    names = [node.op_type for node in analysis.graph.nodes]
    sizes = set() if "Shape" in operators else {"Shape", "Concat", "Squeeze", "Unsqueeze"}
    sizes |= {"Slice"} if operators == "Expand Reshape" else set()
    assert [name for name in names if name in operators.split() or name not in sizes] == operators.split()
    made = tmp_path / "plain.onnx"
    ir.save(analysis.graph.model, made)
    for rows in (3, 5):
        feeds["x"] = np.random.default_rng(rows).standard_normal((rows, 2, 8)).astype(np.float32)
        assert_close(run_whole(made, feeds), run_whole(path, feeds))
