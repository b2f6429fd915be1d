"""Stacks of weights become the weights in them, whether a loop reads them or not."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import onnx_ir as ir
import pytest

from splitc.compiler import compile_model, plan_model
from splitc.runtime import Session
from tests.conftest import LAYER, run_whole
from tests.helpers.graphs import read_graph

WriteModel = Callable[[str], Path]
MODEL = """<ir_version: 8, opset_import: ["" : 17]> g (float[n, 64] x, int64 given) => (float y) <
    float[3, 64, 64] w, int64 zero = {0}, int64 last = {-1}, int64 given = {1}, int64[1] list = {1}
> { a = Gather (w, zero)  b = MatMul (x, a)  REST }"""
TWO = "c = Gather <axis = 0> (w, last)  y = MatMul (b, c)"


def written(write_model: WriteModel, rest: str, is_outside: bool = False) -> Path:
    """The model's file, with random weights there or in a file of their own."""
    model = write_model(MODEL.replace("REST", rest))
    made, random = onnx.load(model), np.random.default_rng(0)
    array = random.standard_normal((3, 64, 64), np.float32) / 8
    made.graph.initializer.append(onnx.numpy_helper.from_array(array, "w"))
    onnx.save(made, model, save_as_external_data=is_outside, size_threshold=1024, location="data")
    return model


@pytest.mark.parametrize("is_outside", [False, True])
def test_parts_at_fixed_places_are_weights(write_model: WriteModel, is_outside: bool, tmp_path: Path) -> None:
    model = written(write_model, TWO, is_outside)
    graph = read_graph(model)
    assert [node.op_type for node in graph.nodes] == ["MatMul", "MatMul"]
    parts = [node.inputs[1] for node in graph.nodes]
    assert [part.name for part in parts if part is not None] == ["w.0", "w.2"]
    assert all(part is not None and isinstance(part.const_value, ir.ExternalTensor) == is_outside for part in parts)
    compile_model(plan_model(model, ["cpu0"], LAYER), tmp_path / "package")
    feeds = {"x": np.ones((2, 64), np.float32)}
    with Session(tmp_path / "package") as session:
        np.testing.assert_array_equal(session.run(feeds)["y"], run_whole(model, feeds)["y"])


@pytest.mark.parametrize(
    "rest",
    [
        "y = Neg (b)",  # one part
        "c = Gather (w, given)  y = MatMul (b, c)",  # a place that a request may choose
        "c = Gather (w, list)  y = MatMul (b, c)",  # a part with the stack's axes
        "c = Gather <axis = 1> (w, last)  y = MatMul (b, c)",
        "c = Gather (w, last)  d = MatMul (b, c)  e = MatMul (d, w)  y = Neg (e)",  # the whole stack is read too
    ],
)
def test_other_stacks_stay(write_model: WriteModel, rest: str) -> None:
    graph = read_graph(written(write_model, rest))
    assert "Gather" in {node.op_type for node in graph.nodes} and "w" in graph.model.graph.initializers


def test_stacks_that_branches_read_stay(write_model: WriteModel) -> None:
    """At fixed places too: each branch would have to be rewritten."""
    branches = [
        f"{name} = {name} () => (float[64, 64] r) {{ p = Gather (w, {place})  r = Neg (p) }}"
        for name, place in (("then_branch", "zero"), ("else_branch", "last"))
    ]
    rest = f"yes = Cast <to = 9> (given)  c = If (yes) <{', '.join(branches)}>  y = MatMul (b, c)"
    graph = read_graph(written(write_model, rest))
    assert "w" in graph.model.graph.initializers
