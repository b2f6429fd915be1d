"""The indices of all elements of a list are a Range, where an exporter has them counted."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from splitc.compiler import compile_model, plan_model
from splitc.runtime import Session
from tests.conftest import LAYER, run_whole
from tests.helpers.graphs import read_graph

WriteModel = Callable[[str], Path]
# Rows of x in reverse, as torch's older exporter writes x[n - 1 - arange(n)].
COUNTED = """<ir_version: 8, opset_import: ["" : {opset}]>
  g (float[n, 4] x) => (float[n, 4] y) <int64[1] zero = {{0}}, int64[1] one = {{1}}> {{
    sizes = Shape (x)
    rows = Gather (sizes, zero)
    ones = ConstantOfShape {value} ({shape})
    found = NonZero (ones)
    column = Transpose <perm = [1, 0]> (found)
    numbers = {numbers}
    last = Sub (rows, one)
    places = Sub (last, numbers)
    y = Gather (x, places) }}"""
ONES, SQUEEZED = "<value = int64[1] {1}>", "Squeeze (column, one)"


def counted(opset: int = 17, value: str = ONES, shape: str = "rows", numbers: str = SQUEEZED) -> str:
    return COUNTED.format(opset=opset, value=value, shape=shape, numbers=numbers)


def test_counted_elements_are_a_range(write_model: WriteModel, tmp_path: Path) -> None:
    path = write_model(counted())
    names = {node.op_type for node in read_graph(path).nodes}
    assert "Range" in names and "NonZero" not in names
    compile_model(plan_model(path, ["cpu0"], LAYER), tmp_path / "package")
    with Session(tmp_path / "package") as session:
        for rows in (1, 2, 5):
            feeds = {"x": np.random.default_rng(rows).standard_normal((rows, 4)).astype(np.float32)}
            np.testing.assert_array_equal(session.run(feeds)["y"], run_whole(path, feeds)["y"])


@pytest.mark.parametrize(
    "model",
    [
        counted(value="<value = int64[1] {0}>"),
        counted(value=""),
        counted(shape="sizes", numbers="Gather <axis = 1> (column, zero)"),
        counted(10, numbers="Squeeze <axes = [1]> (column)"),
    ],
    ids=["zeros", "zeros by default", "two axes", "no Range in opset 10"],
)
def test_others_are_counted(write_model: WriteModel, model: str) -> None:
    assert "NonZero" in {node.op_type for node in read_graph(write_model(model)).nodes}
