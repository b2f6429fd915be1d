"""What is made of nodes and takes no memory, against what ONNX Runtime's profile says."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import pytest
from onnx_ir.passes.common import ShapeInferencePass

from models.writer import Writer
from splitc.compiler.execution.exchange import EngineGraph
from splitc.compiler.execution.run import arena_bytes
from tests.helpers.in_use import BYTES, assert_bytes_are_those_in_use
from tests.helpers.profiles import reads

ROWS = {"x": np.ones((BYTES // 256, 64), np.float32)}


@pytest.mark.parametrize("operator", ["Relu", "Softmax", "Tanh", "Cast", "Erf", "Exp"])
@pytest.mark.parametrize("rows", ["n", BYTES // 256, None])
def test_what_is_read_last_is_overwritten(tmp_path: Path, operator: str, rows: Any) -> None:
    """By some kernels, where the file has both shapes: in numbers, or by names."""
    w = Writer(opset=17)
    attributes = {"to": int(ir.DataType.INT32)} if operator == "Cast" else {}
    first = w.op("CumSum", w.input("x", ir.DataType.FLOAT, [rows, 64]), w.constant(0, np.int64))
    made = w.op(operator, first, **attributes)
    w.output(w.op("ReduceMax", made, keepdims=0), "max", ir.DataType.INT32 if attributes else ir.DataType.FLOAT, [])
    assert_bytes_are_those_in_use(w, ROWS, tmp_path, ["CumSum", operator, "ReduceMax"])


@pytest.mark.parametrize("scaled", ["before", "after", "both"])
def test_scaled_products_are_one_node(tmp_path: Path, scaled: str) -> None:
    w = Writer(opset=17)
    x = w.op("CumSum", w.input("x", ir.DataType.FLOAT, ["n", 64]), w.constant(0, np.int64))
    number = w.weight("number", ir.tensor(np.float32(0.5)))
    side = w.op("Mul", x, number) if scaled != "after" else x
    made = w.op("MatMul", side, w.weight("weight", ir.tensor(np.ones((64, 64), np.float32))))
    if scaled != "before":
        made = w.op("Div", made, number)
    w.output(w.op("CumSum", made, w.constant(0, np.int64)), "y", ir.DataType.FLOAT, ["n", 64])
    assert_bytes_are_those_in_use(w, ROWS, tmp_path, ["CumSum", "FusedMatMul", "CumSum"])


@pytest.mark.parametrize("as_power", [True, False])
def test_gelus_by_a_tangent_are_one_node(tmp_path: Path, as_power: bool) -> None:
    w = Writer(opset=17)
    numbers = {"three": 3.0, "cube": 0.044715, "root": (2 / np.pi) ** 0.5, "one": 1.0, "half": 0.5}
    three, cube, root, one, half = (w.weight(name, ir.tensor(np.float32(n))) for name, n in numbers.items())
    x = w.op("CumSum", w.input("x", ir.DataType.FLOAT, ["n", 64]), w.constant(0, np.int64))
    if as_power:
        inner = w.op("Mul", w.op("Add", x, w.op("Mul", w.op("Pow", x, three), cube)), root)
    else:
        square = w.op("Mul", w.op("Mul", x, cube), x)
        inner = w.op("Mul", w.op("Mul", x, root), w.op("Add", square, one))
    gelu = w.op("Mul", w.op("Mul", x, half), w.op("Add", w.op("Tanh", inner), one))
    w.output(w.op("CumSum", gelu, w.constant(0, np.int64)), "y", ir.DataType.FLOAT, ["n", 64])
    assert_bytes_are_those_in_use(w, ROWS, tmp_path, ["CumSum", "FastGelu", "CumSum"])


@pytest.mark.parametrize("rows", ["n", None])
def test_norms_of_sums_are_one_node_where_sizes_have_names(tmp_path: Path, rows: Any) -> None:
    w = Writer(opset=17)
    x = w.input("x", ir.DataType.FLOAT, [1, rows, 64])
    weight = w.weight("weight", ir.tensor(np.ones(64, np.float32)))
    total = w.op("Add", w.op("CumSum", x, w.constant(1, np.int64)), w.op("CumSum", x, w.constant(2, np.int64)))
    w.output(w.op("LayerNormalization", total, weight), "y", ir.DataType.FLOAT, [1, rows, 64])
    last = ["SkipLayerNormalization"] if rows else ["Add", "LayerNormalization"]
    assert_bytes_are_those_in_use(w, {"x": ROWS["x"][None]}, tmp_path, ["CumSum", "CumSum", *last])


def test_own_sizes_of_a_reshape_are_no_nodes(tmp_path: Path) -> None:
    """A view of what is fed takes no memory, and a Cast to the same type is none."""
    w = Writer(opset=17)
    x = w.input("x", ir.DataType.FLOAT, ["n", 64])
    rows = w.op("Unsqueeze", w.op("Gather", w.op("Shape", x), w.constant(0, np.int64)), w.constant([0], np.int64))
    viewed = w.op("Reshape", x, w.op("Concat", rows, w.constant([8, 8], np.int64), axis=0))
    made = w.op("Cast", w.op("CumSum", viewed, w.constant(0, np.int64)), to=int(ir.DataType.FLOAT))
    w.output(w.op("CumSum", made, w.constant(1, np.int64)), "y", ir.DataType.FLOAT, ["n", 8, 8])
    assert_bytes_are_those_in_use(w, ROWS, tmp_path, ["Reshape", "CumSum", "CumSum"])


def test_a_sum_that_leaves_the_engine_is_there_beside_its_norm() -> None:
    """As a value that another stage takes is, which is no output of the model."""
    w = Writer(opset=17)
    x = w.op("Softmax", w.input("x", ir.DataType.FLOAT, [1, "n", 64]))
    total = w.op("Add", x, w.op("Elu", x))
    norm = w.op("LayerNormalization", total, w.weight("weight", ir.tensor(np.ones(64, np.float32))))
    w.output(w.op("Add", norm, w.op("Elu", norm)), "y", ir.DataType.FLOAT, [1, "n", 64])
    graph = ShapeInferencePass()(w.model()).model.graph

    def bytes_of(kept: ir.Value) -> int:
        size = dict.fromkeys((value for node in graph for value in node.outputs), BYTES)
        ends = frozenset([*graph.outputs, kept])
        engine = EngineGraph(list(graph), reads, lambda v: size.get(v, 0), ends, lambda *_: True)
        return arena_bytes(engine, lambda node: ())

    assert bytes_of(total) > bytes_of(graph.outputs[0])


def test_views_of_merged_values_take_none(tmp_path: Path) -> None:
    """Of two nodes that compute the same one is left, and what is a view of the other's result is one of its."""
    w = Writer(opset=17)
    x = w.op("CumSum", w.input("x", ir.DataType.FLOAT, ["n", 64]), w.constant(0, np.int64))
    first, again = w.op("Erf", x), w.op("Erf", x)
    viewed = w.op("Reshape", again, w.constant([-1, 64], np.int64))
    made = w.op("Add", w.op("CumSum", first, w.constant(1, np.int64)), viewed)
    w.output(w.op("ReduceMax", made, keepdims=0), "max", ir.DataType.FLOAT, [])
    kernels = ["CumSum", "Erf", "CumSum", "Reshape", "Add", "ReduceMax"]
    assert_bytes_are_those_in_use(w, ROWS, tmp_path, kernels)


def test_sums_over_ranks_overwrite_parts_of_known_sizes() -> None:
    """The collective is told so; ONNX Runtime does it where the file has the size."""
    w = Writer(opset=17)
    x = w.input("x", ir.DataType.FLOAT, ["n", 64])
    w.output(
        w.op("MatMul", x, w.weight("weight", ir.tensor(np.ones((64, 64), np.float32)))),
        "y",
        ir.DataType.FLOAT,
        ["n", 64],
    )
    graph = w.model().graph

    def bytes_of(are_known: bool) -> int:
        size, ends, sums = {graph.outputs[0]: BYTES}, frozenset(graph.outputs), {graph.outputs[0]: graph.outputs[0]}
        engine = EngineGraph(list(graph), reads, lambda v: size.get(v, 0), ends, lambda *_: are_known, summed=sums)
        return arena_bytes(engine, lambda node: ())

    assert [round(bytes_of(known) / BYTES) for known in (True, False)] == [1, 2]


def test_what_changes_nothing_is_no_node(tmp_path: Path) -> None:
    w = Writer(opset=17)
    x = w.op("CumSum", w.input("x", ir.DataType.FLOAT, ["n", 64]), w.constant(0, np.int64))
    for kind, number in {"Mul": 1.0, "Div": 1.0, "Add": 0.0, "Sub": 0.0}.items():
        x = w.op("CumSum", w.op(kind, x, w.constant(number, np.float32)), w.constant(0, np.int64))
    # This one gets another axis.
    w.output(w.op("Mul", x, w.constant([[[1.0]]], np.float32)), "y", ir.DataType.FLOAT, [1, "n", 64])
    assert_bytes_are_those_in_use(w, ROWS, tmp_path, [*["CumSum"] * 5, "Mul"])


def test_steps_of_a_norm_by_groups(tmp_path: Path) -> None:
    """ONNX Runtime has no kernel for it: the image, cast, is there with what is centered and the squares."""
    w = Writer(opset=21)
    x = w.op("CumSum", w.input("x", ir.DataType.FLOAT, ["n", 64, 6144]), w.constant(2, np.int64))
    scale, bias = (w.weight(name, ir.tensor(np.ones(64, np.float32))) for name in ("scale", "bias"))
    norm = w.op("GroupNormalization", x, scale, bias, num_groups=4)
    w.output(w.op("CumSum", norm, w.constant(2, np.int64)), "y", ir.DataType.FLOAT, ["n", 64, 6144])
    assert_bytes_are_those_in_use(w, {"x": ROWS["x"].reshape(1, 64, -1)}, tmp_path, None)


def test_transposes_that_undo_each_other_are_no_nodes(tmp_path: Path) -> None:
    """Nodes between that go element by element are done before the axes would be turned."""
    w = Writer(opset=17)
    x = w.op("CumSum", w.input("x", ir.DataType.FLOAT, ["n", 64]), w.constant(0, np.int64))
    turned = w.op("Mul", w.op("Transpose", x, perm=[1, 0]), w.constant(2.0, np.float32))
    back = w.op("Transpose", w.op("Tanh", turned), perm=[1, 0])
    w.output(w.op("CumSum", back, w.constant(0, np.int64)), "y", ir.DataType.FLOAT, ["n", 64])
    assert_bytes_are_those_in_use(w, ROWS, tmp_path, ["CumSum", "Mul", "Tanh", "CumSum"], in_order=True)
