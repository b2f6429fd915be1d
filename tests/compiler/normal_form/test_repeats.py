"""Repeats by one number become reshapes, as if their sizes were known."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import pytest

from splitc.compiler import compile_model, plan_model
from splitc.runtime import Session
from tests.conftest import LAYER, run_whole
from tests.helpers.graphs import read_graph

WriteModel = Callable[[str], Path]
# Each row of x as often as `repeats` says, as torch's older exporter writes repeat_interleave.
REPEATED = """<ir_version: 8, opset_import: ["" : 17]>
  g (float[n, 4] x, int64[n] given, int64 start) => (float[m, 4] y) <
    int64 none = {{0}}, int64 one = {{1}}, int64[1] zero = {{0}}, int64[1] first = {{1}}, int64 start = {{0}}
> {{
    sizes = Shape (x)
    rows = Gather (sizes, zero)
    {repeats}
    most = ReduceMax <keepdims = 0> (repeats)
    list = Unsqueeze (most, zero)
    columns = Gather (sizes, first)
    shape = Concat <axis = 0> (rows, list, columns)
    apart = Unsqueeze (x, first)
    wide = Expand (apart, shape)
    end = Cast <to = 7> (most)
    counted = Range ({start}, end, one)
    asked = Unsqueeze (repeats, first)
    mask = Less (counted, asked)
    places = NonZero (mask)
    turned = Transpose <perm = [1, 0]> (places)
    picked = GatherND (wide, turned)
    y = Neg (picked)
}}"""
THREE = "repeats = ConstantOfShape <value: tensor = int64[1] {3}> (rows)"
SUM = """
    zeros = ConstantOfShape <value: tensor = int64[1] {0}> (rows)
    wide_as = Gather (sizes, one)
    repeats = Add (zeros, wide_as)
"""


@pytest.mark.parametrize("repeats", [THREE, SUM])
def test_repeats_by_one_number_have_known_sizes(write_model: WriteModel, repeats: str, tmp_path: Path) -> None:
    """A number of the model, or a size."""
    model = write_model(REPEATED.format(repeats=repeats, start="none"))
    graph = read_graph(model)
    assert not {"NonZero", "GatherND", "ReduceMax"} & {node.op_type for node in graph.nodes}
    plan = plan_model(model, ["cpu0"], LAYER)
    assert not plan.analysis.costs.bound.uncertain
    compile_model(plan, tmp_path / "package")
    with Session(tmp_path / "package") as session:
        for rows in (1, 5):
            feeds = {"x": np.random.default_rng(0).standard_normal((rows, 4), np.float32)}
            whole = run_whole(model, {**feeds, "given": np.ones(rows, np.int64), "start": np.array(0)})
            (made,) = session.run({**feeds, "given": np.ones(rows, np.int64)}).values()
            np.testing.assert_array_equal(made, whole["y"])
            assert len(made) == rows * (3 if repeats is THREE else 4)


@pytest.mark.parametrize(
    ("repeats", "start"),
    [("repeats = Identity (given)", "none"), (THREE, "start"), (THREE, "one")],
    ids=["given", "start that a request gives", "other start"],
)
def test_others_stay(write_model: WriteModel, repeats: str, start: str) -> None:
    """Repeats that differ, and a mask of some of the repeats."""
    model = write_model(REPEATED.format(repeats=repeats, start=start))
    assert {"NonZero", "GatherND"} <= {node.op_type for node in read_graph(model).nodes}


def test_places_of_another_mask_stay(write_model: WriteModel) -> None:
    text = REPEATED.format(repeats=THREE, start="none").replace("Less (counted, asked)", "Less (asked, counted)")
    assert {"NonZero", "GatherND"} <= {node.op_type for node in read_graph(write_model(text)).nodes}
    onnx.checker.check_model(write_model(text))
