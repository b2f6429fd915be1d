"""A constant of equal elements, or rows, that exporters share between uses is sharded separately for each use."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx_ir as ir
import pytest

from splitc.compiler.graphs.uniform import is_uniform
from tests.helpers.blocks import Block, check_split, sharded
from tests.helpers.graphs import read_graph
from tests.helpers.operators import softmax

WriteModel = Callable[[str], Path]
Bias = Callable[[Block, float, ir.Value], ir.Value]


def for_each_row(b: Block, number: float, _: ir.Value) -> ir.Value:
    bias = np.zeros((5, 16), np.float32)
    bias[0, 0] = number
    return b.weight("zeros", ir.tensor(bias))


def picked(b: Block, number: float, x: ir.Value) -> ir.Value:
    rows = b.op("Unsqueeze", b.indices("rows", [2, 0, 1, 4, 2], [5]), b.ints(-1))
    return b.op("GatherND", for_each_row(b, number, x), rows)


def repeated(b: Block, number: float, x: ir.Value) -> ir.Value:
    return b.op("Expand", b.constant(number, np.float32), b.op("Shape", x))


def filled(b: Block, _: float, x: ir.Value) -> ir.Value:
    return b.op("ConstantOfShape", b.op("Shape", x))


def dequantized(b: Block, number: float, _: ir.Value) -> ir.Value:
    bias = b.weight("zeros", ir.tensor(np.zeros(16, np.int32)))
    return b.op("DequantizeLinear", bias, b.constant(number + 0.5, np.float32))


def dequantized_row(b: Block, number: float, _: ir.Value) -> ir.Value:
    bias = b.weight("zeros", ir.tensor(np.zeros((1, 16), np.int32)))
    return b.op("DequantizeLinear", bias, b.constant(number + 0.5, np.float32))


def mixture(number: float, made: Bias) -> Block:
    """A layer to 16 columns and back to 16, with one bias for both."""
    b = Block()
    x = softmax(b, b.data("x", (5, 16), ["n", 16]))
    zeros = made(b, number, x)
    wide = b.op("Relu", b.op("Add", b.op("MatMul", x, b.w("A", 16, 16)), zeros))
    narrow = b.op("Add", b.op("MatMul", wide, b.w("B", 16, 16)), zeros)
    b.give(softmax(b, b.op("Add", narrow, x)), shape=["n", 16])
    return b


@pytest.mark.parametrize("made", [for_each_row, picked, repeated, filled, dequantized, dequantized_row])
def test_each_use_is_cut_by_itself(tmp_path: Path, made: Bias) -> None:
    """So one sum suffices. Otherwise A's columns are those that Softmax needs whole, and have to be gathered."""
    for plan in check_split(mixture(0, made), tmp_path, ["A", "B"]):
        assert sharded(plan).sums.count == 1


def test_one_that_is_not_uniform_is_one(tmp_path: Path) -> None:
    for plan in check_split(mixture(1, picked), tmp_path, []):
        assert sharded(plan).sums.count > 1


def test_each_reader_has_a_node_of_its_own(write_model: WriteModel) -> None:
    """Also behind another node. An output keeps its node. Sizes and vectors keep one node for all readers."""
    graph = read_graph(
        write_model(
            """<ir_version: 8, opset_import: ["" : 17]>
            g (int64[n] i, float[2, 2] x) => (float[2, 2] y, float[n, 2] z, float[2] s)
            <float[2, 2] w = {3, 3, 3, 3}, int64[2] v = {1, 1}, float[2] f = {1, 1}> {
              z = Gather (w, i)
              t = Transpose (w)
              u = Neg (t)
              a = Mul (x, u)
              y = Add (a, u)
              e = Neg (z)
              r = Concat <axis = 0> (f, f)
              p = Shape (e)
              q = Neg (r)
              k = Slice (q, v, v)
              c = Cast <to = 1> (p)
              m = Add (c, k)
              s = Add (m, k)
            }"""
        )
    )
    kinds = [node.op_type for node in graph.nodes]
    assert {kind: kinds.count(kind) for kind in ("Gather", "Transpose", "Concat", "Slice")} == {
        "Gather": 2,
        "Transpose": 2,
        "Concat": 1,
        "Slice": 1,
    }
    names = [value.name for node in graph.nodes for value in node.outputs]
    assert len(names) == len(set(names))


def test_a_grid_that_two_layers_share(tmp_path: Path) -> None:
    """Each layer reads the same points for each of its inputs. Otherwise A would have one axis twice."""
    b = Block()
    x = softmax(b, b.data("x", (5, 16)))
    grid = b.weight("grid", ir.tensor(np.tile(np.linspace(-1, 1, 3, dtype=np.float32), (16, 1))))

    def spread(value: ir.Value) -> ir.Value:
        near = b.op("Relu", b.op("Sub", b.op("Unsqueeze", value, b.ints(-1)), grid))
        return b.op("Reshape", near, b.ints(0, -1))

    hidden = b.op("MatMul", spread(x), b.w("A", 48, 16))
    b.give(softmax(b, b.op("MatMul", spread(hidden), b.w("B", 48, 16))), shape=[5, 16])
    for plan in check_split(b, tmp_path, ["A", "B"]):
        assert sharded(plan).sums.count == 1


@pytest.mark.parametrize(
    ("array", "expected"),
    [
        (np.zeros((2, 0, 3)), False),
        (np.ones((2, 3)), True),
        (np.tile(np.arange(3), (2, 1)), True),
        (np.tile(np.arange(3), (2, 1)).T, True),
        (np.array([[1, 2, 1], [1, 2, 1], [1, 2, 3]]), False),
        (np.arange(3), False),
    ],
)
def test_what_is_uniform(array: np.ndarray, expected: bool) -> None:
    assert is_uniform(ir.Value(name="w", const_value=ir.tensor(array))) == expected
