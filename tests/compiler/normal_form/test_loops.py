"""Loops with a fixed number of iterations become copies of their bodies."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import pytest

from splitc.compiler import Request, compile_model, plan_model
from splitc.compiler.normal_form import loops
from splitc.runtime import Session
from tests.conftest import LAYER, run_whole
from tests.helpers.graphs import read_graph

WriteModel = Callable[[str], Path]
# Four layers whose weights are stacked, and the mean after each.
LAYERS = """<ir_version: 8, opset_import: ["" : 17]>
g (float[n, 16] x, int64 given) => (float[n, 16] y, float[k, n] means, float[n, 16] last) <
    int64 count = {{4}}, int64 given = {{4}}, int64 three = {{3}}, bool yes = {{1}}, float half = {{0.5}},
    float[4, 16, 32] w, float[4, 32, 16] v
> {{
    z = Relu (x)
    last, means = Loop <body = body
      (int64 i, bool going, float[n, 16] h) => (bool goes_on, float[n, 16] after, float[n] mean) {{
        up = Gather (w, i)
        down = Gather (v, i)
        inner = MatMul (h, up)
        bent = Relu (inner)
        added = MatMul (bent, down)
        after = Add (h, added)
        mean = ReduceMean <axes = [1], keepdims = 0> (after)
        {goes_on}
    }}> ({loop}, z)
    y = Mul (last, half)
}}"""
ON = "goes_on = Identity (going)"


def with_weights(model: Path) -> Path:
    """The model's file, with random weights."""
    made, random = onnx.load(model), np.random.default_rng(0)
    for name, shape in (("w", (4, 16, 32)), ("v", (4, 32, 16))):
        made.graph.initializer.append(onnx.numpy_helper.from_array(random.standard_normal(shape, np.float32) / 4, name))
    onnx.save(made, model)
    return model


# The same layers as JAX's scan writes them.
SCAN = """<ir_version: 8, opset_import: ["" : 17]>
g (float[n, 16] x) => (float[n, 16] y, float[k, n] means, float[n, 16] last) <
    float half = {{0.5}}, float[4, 16, 32] w, float[4, 32, 16] v
> {{
    z = Relu (x)
    last, means = Scan <num_scan_inputs = 2{axes}, body = body
      (float[n, 16] h, float[16, 32] up, float[32, 16] down) => (float[n, 16] after, float[n] mean) {{
        inner = MatMul (h, up)
        bent = Relu (inner)
        added = MatMul (bent, down)
        after = Add (h, added)
        mean = ReduceMean <axes = [1], keepdims = 0> (after)
    }}> (z, w, v)
    y = Mul (last, half)
}}"""
# The same layers as tf2onnx writes a loop: a counter and its end are states, and there is no number of iterations.
COUNTER = """<ir_version: 8, opset_import: ["" : 17]>
g (float[n, 16] x) => (float[n, 16] y, float[k, n] means, float[n, 16] last) <
    int32 zero = {0}, int32 one = {1}, int32 count = {4}, float half = {0.5}, float[4, 16, 32] w, float[4, 32, 16] v
> {
    z = Relu (x)
    first = Less (zero, count)
    begin = Mul (zero, one)
    number, end, last, means = Loop <body = body
      (int64 i, bool going, int32 at, int32 until, float[n, 16] h)
      => (bool goes_on, int32 next, int32 until, float[n, 16] after, float[n] mean) {
        next = Add (at, one)
        goes_on = Less (next, until)
        up = Gather (w, at)
        down = Gather (v, at)
        inner = MatMul (h, up)
        bent = Relu (inner)
        added = MatMul (bent, down)
        after = Add (h, added)
        mean = ReduceMean <axes = [1], keepdims = 0> (after)
    }> (, first, begin, count, z)
    y = Mul (last, half)
}"""
WRITTEN = {
    "loop": LAYERS.format(goes_on=ON, loop="count, yes"),
    "no condition": LAYERS.format(goes_on=ON, loop="count, "),
    "constant condition": LAYERS.format(goes_on="goes_on = Identity (yes)", loop="count, yes"),
    # As onnxscript writes a Python loop: the number of iterations is computed, and inner values have no types.
    "computed number": LAYERS.format(goes_on=ON, loop="squeezed, ").replace("z =", "squeezed = Squeeze (count)  z ="),
    "compared number": LAYERS.format(goes_on="goes_on = Less (i, three)", loop=", yes"),
    "counter": COUNTER,
    "counter without types": COUNTER.replace("int32 at, int32 until, float[n, 16] h)", "at, until, h)"),
    "scan": SCAN.format(axes=""),
    "scan with axes": SCAN.format(axes=", scan_input_axes = [0, 0], scan_output_directions = [0]"),
}


@pytest.mark.parametrize("mode", ["layer", "tensor"])
@pytest.mark.parametrize("text", WRITTEN.values(), ids=WRITTEN)
def test_layers_of_a_loop_are_split(write_model: WriteModel, text: str, mode: str, tmp_path: Path) -> None:
    model = with_weights(write_model(text))
    assert not [node for node in read_graph(model).nodes if node.op_type in loops.LOOPS]
    plan = plan_model(model, "2xcpu", Request(split_mode=mode, spread=True))
    weights = [rank.memory.weights for rank in plan.ranks]
    assert sum(weights) < 1.1 * 4 * 2 * 16 * 32 * 4 and max(weights) < 1.1 * sum(weights) / 2
    compile_model(plan, tmp_path / "package", verify=False)
    with Session(tmp_path / "package") as session:
        for rows in (1, 5):
            feeds = {"x": np.random.default_rng(rows).standard_normal((rows, 16), np.float32)}
            made = session.run(feeds)
            for name, expected in run_whole(model, feeds).items():
                np.testing.assert_allclose(made[name], expected, 1e-5, 1e-6)


def test_scans_backwards_stay(write_model: WriteModel) -> None:
    model = with_weights(write_model(SCAN.format(axes=", scan_input_directions = [1, 0]")))
    assert [node for node in read_graph(model).nodes if node.op_type == "Scan"]


@pytest.mark.parametrize(
    ("goes_on", "loop"),
    [
        (ON, "given, yes"),
        ("small = ReduceMax <keepdims = 0> (after)  goes_on = Less (small, half)", "count, yes"),
        ("goes_on = Less (i, given)", ", yes"),
        (ON, ", yes"),
    ],
    ids=["count of a request", "condition of data", "end of a request", "no end"],
)
def test_other_loops_stay(write_model: WriteModel, goes_on: str, loop: str) -> None:
    model = with_weights(write_model(LAYERS.format(goes_on=goes_on, loop=loop)))
    assert [node for node in read_graph(model).nodes if node.op_type == "Loop"]


def test_long_loops_stay(write_model: WriteModel, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loops, "NODES", 4 * 8 - 1)
    model = with_weights(write_model(LAYERS.format(goes_on=ON, loop="count, yes")))
    assert [node for node in read_graph(model).nodes if node.op_type == "Loop"]


def test_loops_in_loops_and_values_that_stay_the_same(write_model: WriteModel, tmp_path: Path) -> None:
    """The inner loop reads the outer one's number; a value is only handed on; a branch has values of the same names."""
    model = write_model(
        """<ir_version: 8, opset_import: ["" : 17]> g (float[n] x, bool sign) => (float[n] y, float[n] same)
        <int64 two = {2}, int64 three = {3}, bool yes = {1}> {
            y, same = Loop <body = outer
              (int64 i, bool go, float[n] a, float[n] kept) => (bool on, float[n] b, float[n] kept) {
                on = Identity (go)
                number = Cast <to = 1> (i)
                b = Loop <body = inner (int64 j, bool going, float[n] c) => (bool further, float[n] d) {
                    further = Identity (going)
                    moved = Add (c, number)
                    d = If (sign) <
                        then_branch = plus () => (float[n] r) { r = Mul (moved, number) },
                        else_branch = minus () => (float[n] r) { r = Neg (moved) }
                    >
                }> (three, yes, a)
            }> (two, yes, x, x)
        }"""
    )
    graph = read_graph(model)
    assert [node.op_type for node in graph.nodes].count("If") == 6
    names = [value.name for node in graph.model.graph.all_nodes() for value in node.outputs]
    assert len(names) == len(set(names))
    compile_model(plan_model(model, ["cpu0"], LAYER), tmp_path / "package")
    with Session(tmp_path / "package") as session:
        for sign in (True, False):
            feeds = {"x": np.arange(3, dtype=np.float32), "sign": np.array(sign)}
            made = session.run(feeds)
            for name, expected in run_whole(model, feeds).items():
                np.testing.assert_array_equal(made[name], expected)


def test_what_each_iteration_computes_alike_is_there_once(write_model: WriteModel, tmp_path: Path) -> None:
    """A scripted cell brings its weights into an operator's layout in each step: each copy had weights of its own."""
    text = LAYERS.format(goes_on=ON, loop="count, yes")
    for old, new in (
        ("up = Gather (w, i)", "up = Transpose (wide)"),
        ("down = Gather (v, i)", "down = Transpose (up)"),
    ):
        text = text.replace(old, new)
    model = write_model(
        text.replace(
            "float half = {0.5},\n    float[4, 16, 32] w, float[4, 32, 16] v", "float half = {0.5}, float[32, 16] wide"
        )
    )
    made, random = onnx.load(model), np.random.default_rng(0)
    made.graph.initializer.append(
        onnx.numpy_helper.from_array(random.standard_normal((32, 16), np.float32) / 4, "wide")
    )
    onnx.save(made, model)
    graph = read_graph(model)
    products = [node for node in graph.nodes if node.op_type == "MatMul"]
    assert len(products) == 8 and len({node.inputs[1] for node in products}) == 2
    feeds = {"x": random.standard_normal((3, 16), np.float32)}
    plan = plan_model(model, "2xcpu", Request(split_mode="tensor", spread=True))
    compile_model(plan, tmp_path / "package")
    with Session(tmp_path / "package") as session:
        for name, expected in run_whole(model, feeds).items():
            np.testing.assert_allclose(session.run(feeds)[name], expected, 1e-5, 1e-6)


def test_stacks_that_iterations_hand_on_are_parted(write_model: WriteModel) -> None:
    """JAX's exporter carries the weights of a scan through the loop, as states that stay the same."""
    text = LAYERS.format(goes_on=f"{ON}  same = Identity (stack)", loop="count, yes")
    for old, new in (
        ("float[n, 16] h) =>", "float[n, 16] h, float[4, 16, 32] stack) =>"),
        ("float[n, 16] after, float[n] mean)", "float[n, 16] after, float[4, 16, 32] same, float[n] mean)"),
        ("Gather (w, i)", "Gather (stack, i)"),
        ("last, means = Loop", "last, unused, means = Loop"),
        (", z)", ", z, w)"),
    ):
        assert old in text
        text = text.replace(old, new)
    graph = read_graph(with_weights(write_model(text)))
    assert {node.op_type for node in graph.nodes}.isdisjoint({"Gather", "Identity", *loops.LOOPS})


def test_scans_over_an_optional_stack_of_any_length_stay(write_model: WriteModel) -> None:
    text = SCAN.format(axes="").replace("float[n, 16] x)", "float[n, 16] x, float[l, 16, 32] w, float[l, 32, 16] v)")
    model = with_weights(write_model(text.replace(", float[4, 16, 32] w, float[4, 32, 16] v", "")))
    assert [node for node in read_graph(model).nodes if node.op_type == "Scan"]
