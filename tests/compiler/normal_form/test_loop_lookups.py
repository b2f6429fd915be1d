"""Lookups of a list's parts in a loop become one before it, so that their table is split."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import pytest

from splitc.compiler import Request, compile_model, plan_model
from splitc.compiler.graphs.reads import all_nodes
from splitc.runtime import Session
from tests.conftest import run_whole
from tests.helpers.graphs import read_graph

WriteModel = Callable[[str], Path]
# As TorchScript writes an EmbeddingBag: each iteration looks up the numbers of its bag.
MODEL = """<ir_version: 8, opset_import: ["" : 17]>
g (int64[n] numbers, int64[bags] firsts) => (float[bags, 64] y) <
    bool yes = {{1}}, int64[1] zero = {{0}}, int64[1] last = {{-1}}, int64[1] two = {{2}}
> {{
    count = Size (firsts)
    y = Loop <body = body (int64 i, bool going) => (bool goes_on, float[64] row) {{
        goes_on = Identity (going)
        first = Gather (firsts, i)
        start = Unsqueeze (first, zero)
        stop = Add (start, two)
        {part}
        rows = Gather (table, part)
        row = ReduceSum <keepdims = 0> (rows, zero)
    }}> (count, yes)
}}"""
PART = "part = Slice (numbers, start, stop, zero)"
OTHERS = {
    "from the back": "part = Slice (numbers, start, stop, last)",
    "one number, where others may be of no row": "part = Gather (numbers, start)",
    "axes not named": "part = Slice (numbers, start, stop)",
    "computed in the loop": "shifted = Add (numbers, first)  part = Slice (shifted, start, stop, zero)",
}


def written(write_model: WriteModel, part: str) -> Path:
    path = write_model(MODEL.format(part=part))
    model, table = onnx.load(path), np.random.default_rng(0).standard_normal((1 << 17, 64), np.float32)
    model.graph.initializer.append(onnx.numpy_helper.from_array(table, "table"))
    onnx.save(model, path)
    return path


def inner_lookups(model: Path) -> int:
    """How many lookups of the table are in the loop."""
    graph = read_graph(model).model.graph
    lookups = [node for node in all_nodes(graph) if any(value and value.name == "table" for value in node.inputs)]
    return sum(node.graph is not graph for node in lookups)


def test_tables_of_loops_are_split(write_model: WriteModel, tmp_path: Path) -> None:
    model = written(write_model, PART)
    assert not inner_lookups(model)
    plan = plan_model(model, "2xcpu", Request(split_mode="tensor"))
    assert max(rank.memory.weights for rank in plan.ranks) < 1.1 * (1 << 17) * 64 * 4 / 2
    compile_model(plan, tmp_path / "package")
    with Session(tmp_path / "package") as session:
        for bags in (1, 4):
            numbers = np.random.default_rng(bags).integers(0, 1 << 17, 2 * bags)
            feeds = {"numbers": numbers, "firsts": np.arange(bags) * 2}
            np.testing.assert_allclose(session.run(feeds)["y"], run_whole(model, feeds)["y"], 1e-6)


@pytest.mark.parametrize("part", OTHERS.values(), ids=OTHERS)
def test_other_lookups_stay(write_model: WriteModel, part: str) -> None:
    assert inner_lookups(written(write_model, part)) == 1
