"""Small numbers that are computed from constants are constants, and nodes that change nothing are not there.

torch's newer exporter leaves both to its optimizer.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx_ir as ir
import pytest

from splitc.compiler import Request, compile_model, plan_model
from splitc.runtime import Session
from tests.helpers.graphs import read_graph

WriteModel = Callable[[str], Path]
HEAD = '<ir_version: 8, opset_import: ["" : 18]> g '


def test_sizes_and_single_numbers_are_folded(write_model: WriteModel) -> None:
    """The bounds of a slice, and a factor, as torch writes them: casts and reshapes of constants."""
    path = write_model(
        HEAD
        + """(float16[n, 8] x) => (float16[n, m] y)
        <int64 zero = {0}, int64 four = {4}, int64[1] rest = {-1}, int64[1] one = {1}, float scale = {0.25}>
        { start = Reshape (zero, rest)  long = Cast <to = 7> (four)  end = Reshape (long, rest)
          part = Slice (x, start, end, one, one)  root = Sqrt (scale)  factor = CastLike (root, part)
          y = Mul (part, factor) }"""
    )
    graph = read_graph(path)
    assert [node.op_type for node in graph.nodes] == ["Slice", "Mul"]
    values = {value.name: value.const_value for node in graph.nodes for value in graph.weights(node)}
    factor, end = values["factor"], values["end"]
    assert factor is not None and factor.dtype.name == "FLOAT16" and float(factor.numpy()) == 0.5
    assert end is not None and end.numpy().tolist() == [4]


def test_the_scales_of_a_norm_of_groups_are_constants(write_model: WriteModel) -> None:
    path = write_model(
        HEAD
        + """(float[1, 4, n] x) => (float[1, 4, n] y) <int64[1] count = {4}, float one = {1}, float zero = {0}>
        { scale = Expand (one, count)  shift = Expand (zero, count)  y = InstanceNormalization (x, scale, shift) }"""
    )
    graph = read_graph(path)
    (norm,) = graph.nodes
    scale = next(value.const_value for value in graph.weights(norm) if value.name == "scale")
    assert scale is not None and np.array_equal(scale.numpy(), np.ones(4, np.float32))


def test_what_is_computed_from_weights_and_optional_inputs_stays(write_model: WriteModel) -> None:
    """Weights keep their names, by which adapters and places find them; a request may override the other ones."""
    path = write_model(
        HEAD
        + """(float[2, 2] x, int64[1] size) => (float[2, 2] y) <int64[1] size = {2}, float[2, 2] w = {1, 2, 3, 4}>
        { t = Transpose <perm = [1, 0]> (w)  u = MatMul (x, t)  twice = Mul (size, size)  y = Expand (u, twice) }"""
    )
    assert [node.op_type for node in read_graph(path).nodes] == ["Transpose", "MatMul", "Mul", "Expand"]


def test_a_slice_whose_end_a_request_may_override_stays(write_model: WriteModel) -> None:
    path = write_model(
        HEAD
        + """(float[n, 8] x, int64[1] end) => (float[m, 8] y)
        <int64[1] end = {9223372036854775807}, int64[1] zero = {0}, int64[1] one = {1}>
        { part = Slice (x, zero, end, zero, one)  y = Neg (part) }"""
    )
    assert [node.op_type for node in read_graph(path).nodes] == ["Slice", "Neg"]


def test_nodes_that_change_nothing_are_bypassed(write_model: WriteModel) -> None:
    path = write_model(
        HEAD
        + """(float[n, 8] x, float[m, 8] past) => (float[k, 8] present, float[k, 8] y)
        <int64[1] zero = {0}, int64[1] end = {9223372036854775807}, int64[1] one = {1}, int64[1] eight = {8},
        float half = {0.5}, bool no = {0}, int64[4] pads = {0, 0, 0, 0}>
        { same = Identity (past)  a = Transpose <perm = [0, 1]> (x)  b = Cast <to = 1> (a)
          c = Slice (b, zero, end, one, one)  d = Concat <axis = 0> (c)
          e = Dropout (d, half, no)  f = Pad (e, pads)
          present = Concat <axis = 0> (same, f)  i = Slice (present, zero, eight, one, one)  y = Identity (i) }"""
    )
    graph = read_graph(path)
    assert [node.op_type for node in graph.nodes] == ["Concat", "Slice"]
    assert [value.name for value in graph.nodes[0].inputs if value is not None] == ["past", "x"]
    assert [value.name for value in graph.outputs] == ["present", "y"]


def test_what_a_node_passes_on_as_an_output_becomes_the_output(write_model: WriteModel) -> None:
    """The node stays if it passes on an input, a weight, or an output."""
    path = write_model(
        HEAD
        + """(float[n, 8] x) => (float[n, 8] y, float[n, 8] z, float[n, 8] same, float[8] w)
        <float[8] weight = {1, 2, 3, 4, 5, 6, 7, 8}>
        { a = Add (x, weight)  y = Cast <to = 1> (a)  z = Identity (a)  same = Identity (x)  w = Identity (weight) }"""
    )
    graph = read_graph(path)
    assert [node.op_type for node in graph.nodes] == ["Add", "Identity", "Identity", "Identity"]
    assert [value.name for value in graph.outputs] == ["y", "z", "same", "w"]


@pytest.mark.parametrize(
    "node",
    [
        "Transpose (x)",
        "Transpose <perm = [1, 0]> (x)",
        "Cast <to = 10> (x)",
        "Slice (x, one, end, one, one)",
        "Slice (x, zero, one, one, one)",
        "Slice (x, end, begin, one, back)",
        "Slice (x, zero, end, one, two)",
        "Pad (x, pads)",
        "Dropout (x, half, yes)",
    ],
)
def test_nodes_that_change_something_stay(node: str, write_model: WriteModel) -> None:
    path = write_model(
        HEAD
        + f"""(float[8, 8] x) => (y)
        <int64[1] zero = {{0}}, int64[1] end = {{9223372036854775807}}, int64[1] one = {{1}},
        int64[1] two = {{2}}, int64[4] pads = {{0, 0, 0, 1}},
        float half = {{0.5}}, bool yes = {{1}}, int64[1] back = {{-1}}, int64[1] begin = {{-9223372036854775807}}>
        {{ v = {node}  y = Neg (v) }}"""
    )
    assert len(read_graph(path).nodes) == 2


def test_a_sum_of_two_values_is_an_addition(write_model: WriteModel) -> None:
    path = write_model(HEAD + "(float[n, 8] x, float[8] b) => (float[n, 8] y) { a = Sum (x, b)  y = Sum (a, x, b) }")
    assert [node.op_type for node in read_graph(path).nodes] == ["Add", "Sum"]


def test_sizes_of_weights_are_folded(write_model: WriteModel) -> None:
    """The bias of a convolution without one is as long as its weight: zeros, expanded to that."""
    path = write_model(
        HEAD
        + """(float[1, 1, n] x) => (float[1, 3, n] y)
        <float[3, 1, 1] w = {1, 2, 3}, int64[1] one = {1}, float zero = {0}>
        { count = Shape <start = 0, end = 1> (w)  size = Expand (count, one)  bias = Expand (zero, size)
          y = Conv (x, w, bias) }"""
    )
    assert [node.op_type for node in read_graph(path).nodes] == ["Conv"]


def test_equal_casts_of_a_value_are_one(write_model: WriteModel) -> None:
    path = write_model(
        HEAD
        + """(float16[n] x) => (float[n] z, float[n] y, double[n] w)
        { z = Cast <to = 1> (x)  a = Cast <to = 1> (x)  b = Cast <to = 1> (x)  c = Cast <to = 11> (x)
          y = Mul (a, b)  w = Neg (c) }"""
    )
    graph = read_graph(path)
    assert [node.op_type for node in graph.nodes] == ["Cast", "Cast", "Cast", "Mul", "Neg"]
    assert len({value for node in graph.nodes if node.op_type == "Mul" for value in node.inputs}) == 1


def test_numbers_of_bfloat16_stay_so(write_model: WriteModel, tmp_path: Path) -> None:
    """CPUs compute them in float32. Gemma's norms have 1 + weight; its scores are divided by the root of a size."""
    path = write_model(
        """<ir_version: 10, opset_import: ["" : 22]> g (bfloat16[n, 4] x) => (bfloat16[n, 4] y)
        <float[4] scale = {1, 2, 3, 4}, float[4, 4] w = {1, 2, 3, 4, 5, 6, 7, 8, 1, 2, 3, 4, 5, 6, 7, 8},
         float one = {1}, int64 last = {-1}>
        { weight = Cast <to = 16> (w)  wide = Cast <to = 16> (scale)  small = Cast <to = 16> (one)
          product = MatMul (x, weight)  factor = Add (wide, small)  scaled = Mul (product, factor)
          sizes = Shape (x)  size = Gather <axis = 0> (sizes, last)  number = Cast <to = 16> (size)
          root = Sqrt (number)  y = Div (scaled, root) }"""
    )
    for mode in ("layer", "tensor"):
        plan = plan_model(path, ["2xcpu"], Request(split_mode=mode, shapes={"x": (2, 4)}))
        compile_model(plan, tmp_path / mode)
        with Session(tmp_path / mode) as session:
            x = np.ones((2, 4), ir.DataType.BFLOAT16.numpy())
            given = np.asarray(session.run({"x": x})["y"], np.float32)
        np.testing.assert_allclose(given, [[12, 24, 40, 60]] * 2, rtol=0.02)


def test_what_is_expanded_to_no_elements_is_empty(write_model: WriteModel, tmp_path: Path) -> None:
    """As the empty list with which a search begins. With constant sizes ONNX Runtime would take the Expand out."""
    path = write_model(
        HEAD
        + """(float[n, 3, 1] x, int64[n, 3, 1] given) => (float[n, 3, k] y)
        <int64[1] zero = {0}, int64[1] one = {1}, int64[1] two = {2}, int64[1] three = {3}>
        { own = Shape (x)  at = Abs (given)  rows = Gather (own, zero)  long = Concat <axis = 0> (rows, three, zero)
          listed = ConstantOfShape (long)  sizes = Shape (listed)  none = Slice (sizes, two, three, zero)
          wanted = Concat <axis = 0> (one, one, none)  at_none = Expand (at, wanted)
          some = GatherElements <axis = 1> (listed, at_none)  y = Concat <axis = 2> (some, x) }"""
    )
    compile_model(plan_model(path, "2xcpu", Request(split_mode="layer")), tmp_path / "package")
    with Session(tmp_path / "package") as session:
        x = np.arange(6, dtype=np.float32).reshape(2, 3, 1)
        np.testing.assert_array_equal(session.run({"x": x, "given": np.zeros((2, 3, 1), np.int64)})["y"], x)
