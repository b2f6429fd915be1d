"""Feeds that contradict a model's symbols are refused if they can't be right, and only then."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnxruntime as ort
import pytest

from splitc.compiler import Request, compile_model, plan_model
from splitc.runtime import Session
from splitc.runtime.arrays.files import save_arrays
from splitc.runtime.errors import FeedError
from tests.conftest import decoder_feeds
from tests.helpers.command import splitc

Array = np.ndarray
WriteModel = Callable[[str], Path]
UNIT = "{1,0,0,0, 0,1,0,0, 0,0,1,0, 0,0,0,1}"
LINES = "\n".join(f"h{n + 1} = MatMul(h{n}, w)" for n in range(6))
# The last stage gives y the shape of p, which lies in the first one: it takes the size n of b instead.
FAR_SIZE = f"""<ir_version: 8, opset_import: ["" : 17]>
    g (float[n, 4] b, float[n, 4] a) => (float[m, q] y, float[n, 4] z)
    <float[4, 4] w = {UNIT}, float[4, 4] v = {UNIT}, int64[2] two = {{-1, 2}}, int64[2] four = {{-1, 4}}>
    {{ p = Relu(a)
      s = Shape(p)
      f = Reshape(p, two)
      h0 = Reshape(f, four)
      {LINES}
      g1 = Reshape(h6, two)
      g2 = Relu(g1)
      y = Reshape(g2, s)
      z = MatMul(b, v) }}"""

# Nothing of b is read but its sizes.
OWN_SIZE = f"""<ir_version: 8, opset_import: ["" : 17]>
    g (float[n, 4] b, float[n, 4] a) => (float[m, 4] y, float[n, 4] h6)
    <float[4, 4] w = {UNIT}>
    {{ h0 = Relu(a)
      {LINES}
      s = Shape(b)
      y = ConstantOfShape(s) }}"""


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"input_ids": np.ones((3, 3), np.int64)},
            "'batch' is 3 in the input 'input_ids' and 2 in 'attention_mask'",
        ),
        (
            {"position_ids": np.ones((2, 2), np.int64)},
            "'sequence' is 3 in the input 'input_ids' and 2 in 'position_ids'",
        ),
        ({"past_key_values.1.key": np.ones((2, 2, 7, 16), np.float32)}, "'past' is 5 in the input 'past_key_values.0"),
        (
            {"attention_mask": np.ones((2, 3), np.int64)},
            "'past . sequence' is 8 by the other inputs and 3 in 'att",
        ),
    ],
)
def test_sizes_that_an_engine_refuses_are_named(package: Path, change: dict[str, Array], message: str) -> None:
    with Session(package) as session:
        with pytest.raises(FeedError, match=message):
            session.run({**decoder_feeds(), **change})
        with pytest.raises(FeedError, match=message):
            session.submit({**decoder_feeds(), **change}).result()
        session.run(decoder_feeds())


def test_misused_command_ends_with_2(package: Path, tmp_path: Path) -> None:
    save_arrays(tmp_path / "x.npz", {**decoder_feeds(), "position_ids": np.ones((2, 2), np.int64)})
    said = splitc("run", package, "--inputs", tmp_path / "x.npz", "--outputs", tmp_path / "y.npz", code=2).stderr
    assert "error: 'sequence' is 3 in the input 'input_ids' and 2 in 'position_ids'" in " ".join(said.split())
    assert not (tmp_path / "y.npz").exists()


@pytest.mark.parametrize(
    ("mode", "model", "same"), [("layer", FAR_SIZE, True), ("tensor", FAR_SIZE, False), ("layer", OWN_SIZE, False)]
)
def test_one_name_for_two_sizes(mode: str, model: str, same: bool, write_model: WriteModel, tmp_path: Path) -> None:
    """ONNX Runtime takes any sizes; a package refuses those for which it would be wrong, and no others."""
    path = write_model(model)
    request = Request(split_mode=mode, spread=True, shapes={"a": (3, 4), "b": (3, 4)})
    assert compile_model(plan_model(path, ["4xcpu"], request), tmp_path / "p").shared_sizes == (["n"] if same else [])
    with Session(tmp_path / "p") as session:
        for rows in (2, 5):
            feeds = {"a": np.random.default_rng(0).random((2, 4), np.float32), "b": np.ones((rows, 4), np.float32)}
            if same and rows != 2:
                with pytest.raises(FeedError, match="'n' is 5 in the input 'b' and 2 in 'a': this package treats them"):
                    session.run(feeds)
                continue
            expected = ort.InferenceSession(str(path), providers=["CPUExecutionProvider"]).run(None, feeds)
            assert all(map(np.array_equal, session.run(feeds).values(), expected))


def test_records_are_no_numbers(write_model: WriteModel, tmp_path: Path) -> None:
    """Pixels of four bytes, for one, have as many as a float."""
    path = write_model(f'<ir_version: 8, opset_import: ["" : 17]> g (float[n, 4] x) => (float[n, 4] y) '
                       f'<float[4, 4] w = {UNIT}> {{ y = MatMul(x, w) }}')  # fmt: skip
    compile_model(plan_model(path, ["cpu0"], Request()), tmp_path / "package", verify=False)
    pixels = np.zeros((2, 4), [(channel, "u1") for channel in "rgba"])
    with Session(tmp_path / "package") as session:
        for feed in (pixels, np.zeros((2, 4), "V4")):
            with pytest.raises(FeedError, match=r"input 'x' is .*, and the model takes float32"):
                session.run({"x": feed})
