"""Lists that loops append to become scan outputs, behind which weights are split."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import pytest

from splitc.compiler import Request, compile_model, plan_model
from splitc.runtime import Session
from tests.conftest import run_whole
from tests.helpers.graphs import read_graph

WriteModel = Callable[[str], Path]
# As torch exports a scripted module that lists the outputs of its steps: float[rows, 16] each.
MODEL = """<ir_version: 8, opset_import: ["" : 17]>
g (float[rows, 16] x, int64 steps) => (float y, float last) <
    bool yes = {{1}}, int64 first = {{0}}, int64[1] axes = {{0}}, int64[2] sizes = {{1, 16}}
> {{
    empty = SequenceEmpty <dtype = 1> ()
    last, items = Loop <body = body
      (int64 i, bool going, float[rows, 16] h, seq(float[rows, 16]) listed)
      => (bool goes_on, float[rows, 16] after, seq(float[rows, 16]) longer) {{
        goes_on = Identity (going)
        inner = MatMul (h, w)
        after = Tanh (inner)
        {append}
    }}> (steps, yes, x, empty)
    stacked = ConcatFromSequence <{how}> (items)
    up = MatMul (stacked, u)
    bent = Relu (up)
    y = MatMul (bent, v)
}}"""
APPEND, STACK = "longer = SequenceInsert (listed, after)", "axis = 1, new_axis = 1"
# As torch's newer exporter writes an EmbeddingBag: what is joined has one row, as one of the branches knows.
BAG = """
    is_first = Equal (i, first)
    row = If (is_first) <
        then_branch = none () => (float[1, 16] zeros) { zeros = ConstantOfShape (sizes) },
        else_branch = some () => (bag) { bag = ReduceSum <keepdims = 1> (after, axes) }
    >
    longer = SequenceInsert (listed, row)"""


def written(write_model: WriteModel, how: str = STACK, append: str = APPEND) -> Path:
    text = MODEL.format(how=how, append=append)
    path = write_model(text.replace("seq(float[rows, 16])", "seq(float)") if append == BAG else text)
    model, random = onnx.load(path), np.random.default_rng(0)
    for name, shape in {"w": (16, 16), "u": (16, 64), "v": (64, 16)}.items():
        model.graph.initializer.append(
            onnx.numpy_helper.from_array(random.standard_normal(shape, np.float32) / 4, name)
        )
    onnx.save(model, path)
    return path


@pytest.mark.parametrize(
    ("how", "append"),
    [
        ("axis = 0, new_axis = 1", APPEND),
        (STACK, APPEND),
        ("axis = -2, new_axis = 1", APPEND),
        ("axis = 0", BAG),
        ("axis = -2", BAG),
    ],
)
def test_weights_behind_a_list_are_split(write_model: WriteModel, tmp_path: Path, how: str, append: str) -> None:
    model = written(write_model, how, append)
    plan = plan_model(model, "2xcpu", Request(split_mode="tensor", spread=True))
    assert max(rank.memory.weights for rank in plan.ranks) < 4 * (16 * 16 + 1.1 * 16 * 64)
    compile_model(plan, tmp_path / "package")
    with Session(tmp_path / "package") as session:
        for rows, steps in ((1, 3), (4, 2), (2, 1)):
            feeds = {"x": np.random.default_rng(rows).standard_normal((rows, 16), np.float32), "steps": np.array(steps)}
            made = session.run(feeds)
            for name, expected in run_whole(model, feeds).items():
                np.testing.assert_allclose(made[name], expected, 1e-5, 1e-5)


@pytest.mark.parametrize(
    ("how", "append"),
    [
        ("axis = 1", APPEND),
        ("axis = 1", BAG),
        ("axis = 0", BAG.replace("ReduceSum <keepdims = 1> (after, axes)", "Identity (after)")),
        (STACK, "longer = SequenceInsert (listed, after, first)"),
        (STACK, f"{APPEND}  length = SequenceLength (listed)"),
        (STACK, "more = SequenceInsert (listed, after)  longer = SequenceInsert (more, after)"),
        (STACK, "longer = SequenceErase (listed)"),
    ],
    ids=["joined", "joined elsewhere", "several rows", "at the front", "read", "twice", "erased"],
)
def test_other_lists_stay(write_model: WriteModel, how: str, append: str) -> None:
    graph = read_graph(written(write_model, how, append))
    assert "ConcatFromSequence" in {node.op_type for node in graph.nodes}
