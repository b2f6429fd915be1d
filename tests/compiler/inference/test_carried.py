"""States of loops that grow have no size that is known: sizes behind a loop were those of its first iteration."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import pytest

from splitc.compiler import Request, compile_model, plan_model
from splitc.compiler.inference.shapes import infer_shapes
from splitc.runtime import Session
from tests.conftest import assert_close, run_whole
from tests.helpers.blocks import Block
from tests.helpers.graphs import read_graph

WriteModel = Callable[[str], Path]
# Steps are listed along the second axis. Before the last one, `former` has one row less.
MODEL = """<ir_version: 8, opset_import: ["" : 17]>
g (float[rows, 4] x, int64 steps) => (float y, int64 count, int64 before, float[rows, 4] last)
<int64[1] one = {{1}}, int64[1] zero = {{0}}, int64[1] width = {{4}}, bool yes = {{1}}> {{
    own = Shape (x)  some = Gather (own, zero)  empty = Concat <axis = 0> (some, zero, width)
    listed = ConstantOfShape (empty)
    grown, former, last = Loop <body = body
      (int64 i, bool going, float[{0}] list, float[{0}] old, float[rows, 4] h)
      => (bool goes_on, float{1} longer, float{1} kept, float[rows, 4] next) {{
        goes_on = Identity (going)
        next = Sin (h)
        row = Unsqueeze (next, one)
        longer = Concat <axis = 1> (list, row)
        kept = Identity (list)
    }}> (steps, yes, listed, listed, x)
    all = Shape (grown)  count = Gather (all, one)
    others = Shape (former)  before = Gather (others, one)
    long = Cast <to = 1> (count)  y = Div (grown, long)
}}"""


@pytest.mark.parametrize(
    ("begins", "ends"),
    [("rows, 0, 4", "[rows, 0, 4]"), ("rows, 0, 4", "[rows, more, 4]"), ("rows, some, 4", "[rows, more, 4]")],
)
def test_sizes_behind_a_loop_are_those_of_its_last_iteration(
    write_model: WriteModel, tmp_path: Path, begins: str, ends: str
) -> None:
    """As torch's exporter declares the states of a scripted loop: with the sizes that they have first."""
    model = write_model(MODEL.format(begins, ends))
    compile_model(plan_model(model, "2xcpu", Request(split_mode="layer")), tmp_path / "package")
    with Session(tmp_path / "package") as session:
        for rows, steps in ((1, 1), (2, 3), (3, 5)):
            feeds = {"x": np.random.default_rng(rows).random((rows, 4), np.float32), "steps": np.array(steps)}
            made = session.run(feeds)
            for name, expected in run_whole(model, feeds).items():
                np.testing.assert_allclose(made[name], expected, 1e-6)


def test_sizes_of_states_that_stay_are_known(write_model: WriteModel) -> None:
    graph = read_graph(write_model(MODEL.format("rows, 0, 4", "[rows, 0, 4]")))
    infer_shapes(graph.model)
    (loop,) = (node for node in graph.nodes if node.op_type == "Loop")
    grown, _, last = (value.shape for value in loop.outputs)
    assert [str(size) for size in last or ()] == ["rows", "4"]
    assert grown is not None and str(grown[0]) == "rows" and not isinstance(grown[1], int) and grown[2] == 4


# Numbers are doubled until one is 100 or more, at most ten times.
ENDED = """<ir_version: 8, opset_import: ["" : 17]>
g (float[rows, 4] x) => (float y, int64 count)
<int64 ten = {10}, int64[1] zero = {0}, bool yes = {1}, float most = {100}> {
    begin = Abs (x)
    last, listed = Loop <body = body
      (int64 i, bool going, float[rows, 4] h) => (bool goes_on, float[rows, 4] next, float[rows, 4] item) {
        next = Add (h, h)
        largest = ReduceMax <keepdims = 0> (next)
        goes_on = Less (largest, most)
        item = Identity (next)
    }> (ten, yes, begin)
    sizes = Shape (listed)  count = Gather (sizes, zero)  long = Cast <to = 1> (count)  y = Div (listed, long)
}"""


def test_a_loop_that_a_condition_ends_lists_fewer_items_than_it_may(write_model: WriteModel, tmp_path: Path) -> None:
    model = write_model(ENDED)
    compile_model(plan_model(model, "2xcpu", Request(split_mode="layer")), tmp_path / "package")
    with Session(tmp_path / "package") as session:
        for largest, count in ((30, 2), (0.01, 10), (99, 1)):
            feeds = {"x": np.full((2, 4), largest, np.float32)}
            made, expected = session.run(feeds), run_whole(model, feeds)
            assert made["count"] == expected["count"] == [count]
            np.testing.assert_allclose(made["y"], expected["y"], 1e-6)


REPEATED = """<ir_version: 8, opset_import: ["" : 17]>
g (float[batch, 5, 16] x, int64 steps) => (float[batch, 5, 16] y)
<int64[1] flat = {{-1}}, float[16, 1024] w, float[1024, 16] v> {{
    z = Softmax (x)
    last = Loop <body = body (int64 i, bool going, float{0} h) => (bool goes_on, float{0} next) {{
        goes_on = Identity (going)  next = Sin (h)
    }}> (steps, , z)
    sizes = Shape (last)  line = Reshape (last, flat)  again = Reshape (line, sizes)
    inner = MatMul (again, w)  bent = Relu (inner)  y = MatMul (bent, v)
}}"""


@pytest.mark.parametrize("declared", ["[]", "[batch, 5, 16]", "[rows, 5, 16]", "[3, 5, 16]"])
def test_weights_behind_a_loop_without_a_condition_are_split(
    write_model: WriteModel, tmp_path: Path, declared: str
) -> None:
    """The rule of Loop wants a condition, and knew no shape without one. Declared numbers may be of one request."""
    b = Block()
    model = onnx.load(write_model(REPEATED.format(declared)))
    for name, shape in (("w", (16, 1024)), ("v", (1024, 16))):
        model.graph.initializer.append(onnx.numpy_helper.from_array(b.random(name, *shape), name))
    onnx.save(model, tmp_path / "model.onnx")
    request = Request(split_mode="tensor", shapes={"x": (3, 5, 16)}, memory=["1GiB"])
    plan = plan_model(tmp_path / "model.onnx", "2xcpu", request)
    assert {weight.name for weight in plan.weights if weight.split} == {"w", "v"}
    assert not plan.analysis.costs.bound.unknown
    compile_model(plan, tmp_path / "package")
    with Session(tmp_path / "package") as session:
        for rows, steps in ((1, 0), (2, 3), (3, 1)):
            feeds = {"x": b.random("x", rows, 5, 16), "steps": np.array(steps)}
            assert_close(session.run(feeds), run_whole(tmp_path / "model.onnx", feeds))
