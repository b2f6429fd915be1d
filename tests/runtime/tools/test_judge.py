"""Which part of a difference the unsplit model causes itself."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx_ir as ir
import pytest

from models.writer import save
from splitc.runtime.tools.compare import compare
from splitc.runtime.tools.judge import Judged, judge
from splitc.runtime.tools.rounding import Arrays, nudged, nudged_weights
from splitc.runtime.tools.unsplit import CPU, Reference, RunModel
from tests.helpers.blocks import FLOAT, Block
from tests.helpers.command import splitc


def outputs(**values: float) -> dict[str, npt.NDArray[Any]]:
    return {name: np.full((2, 2), value, np.float32) for name, value in values.items()}


FEEDS = {"x": np.ones(2, np.float32)}


def never(feeds: Arrays) -> dict[str, npt.NDArray[Any]]:
    raise AssertionError("the unsplit model need not run again")


def judged(actual: Arrays, run: RunModel = never, plain: RunModel = never, excused: bool = True) -> Judged:
    """The judgement of these outputs, if y and z of the unsplit model are 1."""
    whole = Reference(CPU, "", run, plain, lambda feeds: map(run, nudged(feeds)))
    return judge(compare, whole, FEEDS, outputs(y=1, z=1), actual, excused=excused)


def same(feeds: Arrays) -> dict[str, npt.NDArray[Any]]:
    return outputs(y=1, z=1)


def test_outputs_that_agree_are_compared_once() -> None:
    found = judged(outputs(y=1, z=1))
    assert (found.passed, found.notes) == (True, [])


def test_output_of_nothing_but_nan_is_not_compared() -> None:
    """Inputs that are masked everywhere give such outputs, whatever the split did to them."""
    whole = Reference(CPU, "", never, never, lambda feeds: map(never, nudged(feeds)))
    found = judge(compare, whole, FEEDS, outputs(y=np.nan, z=1), outputs(y=np.nan, z=1))
    assert [each.name for each in found.differences] == ["z"]
    assert "not compared: y" in found.notes[0]


def test_output_that_the_model_gives_otherwise_each_time_is_not_compared() -> None:
    found = judged(outputs(y=2, z=1), lambda _: outputs(y=1.5, z=1))
    assert found.passed
    assert "not compared: y" in found.notes[0]


def test_output_that_optimizations_change_is_compared_without_them() -> None:
    found = judged(outputs(y=2, z=1), same, lambda _: outputs(y=2, z=1))
    assert found.passed
    assert "change y of the unsplit model by 1.0e+00" in found.notes[0]


def moving(by: float) -> RunModel:
    """A model whose y changes if its input changes in the last digit, as with activations quantized to 8 bits."""
    return lambda feeds: outputs(y=1 if feeds["x"][0] == 1 else 1 + by, z=1)


def test_output_may_be_about_as_far_off_as_rounding_moves_it() -> None:
    found = judged(outputs(y=1.06, z=1), moving(0.04), same)
    assert found.passed
    assert "y: the difference is rounding" in found.notes[0] and found.notes[0].endswith("4.0e-02")
    assert not judged(outputs(y=1.06, z=1), moving(0.04), same, excused=False).passed


def rarely(feeds: Arrays) -> dict[str, npt.NDArray[Any]]:
    """A model whose y changes if its input changes by more than the last digit: few numbers are rounded otherwise."""
    return outputs(y=1 if np.abs(feeds["x"] - 1).max() < 2e-7 else 1.04, z=1)


def test_output_that_more_than_the_last_digit_moves_may_be_as_far_off() -> None:
    """Ranks sum in another order, which moves the sums by some last digits."""
    assert judged(outputs(y=1.06, z=1), rarely, same).passed


@pytest.mark.parametrize("run", [same, moving(0.02)])
@pytest.mark.parametrize("plain", [same, lambda _: {}, lambda _: outputs(y=1.02, z=1.2)])
def test_any_other_difference_stays_one(run: RunModel, plain: RunModel) -> None:
    found = judged(outputs(y=1.06, z=1), run, plain)
    assert ([each.passed for each in found.differences], found.notes) == ([False, True], [])


def test_output_that_rounding_moves_far_is_said_to_be_unsteady() -> None:
    """As the sound of a quantized voice model: another order of summation may change all of it."""
    found = judged(outputs(y=3, z=1), moving(0.3), same)
    assert ([each.passed for each in found.differences], found.notes) == ([False, True], [])
    assert found.unsteady == "rounding alone changes y of the unsplit model by 3.0e-01"
    assert judged(outputs(y=1.5, z=1.5), moving(0.3), same).unsteady == ""  # z is steady, and y is excused


@pytest.mark.parametrize(("product", "said"), [("", ""), ("h", "'h' of the unsplit model has numbers beyond")])
def test_infinities_that_the_model_computes_itself_are_named(product: str, said: str) -> None:
    whole = Reference(CPU, "", same, same, lambda feeds: [], lambda feeds: product)
    infinite = judge(compare, whole, FEEDS, outputs(y=1, z=1), outputs(y=np.inf, z=1))
    assert not infinite.passed and infinite.unsteady.startswith(said) and bool(infinite.unsteady) == bool(said)
    assert judge(compare, whole, FEEDS, outputs(y=1, z=1), outputs(y=2, z=1)).unsteady == ""  # no infinity is there


def test_rows_that_the_model_leaves_as_the_memory_was_are_not_compared() -> None:
    """Two runs of the unsplit model may find the same memory, as if it computed these rows."""
    whole = Reference(CPU, "", same, same, lambda feeds: [])
    found = judge(compare, whole, FEEDS, outputs(y=1, z=1), outputs(y=1, z=5), unset=["z", "not given"])
    assert ([each.name for each in found.differences], found.passed) == (["y"], True)
    assert found.notes == ["not compared: z, of which the model sets only the rows that are filled"]


WEIGHTS = (("up", (64, 128), 2.0), ("down", (128, 64), 30.0))


def test_sums_that_leave_the_range_of_float16_are_no_fault_of_the_split(tmp_path: Path) -> None:
    """ONNX Runtime computes the unsplit model's in float32 on CPUs, and ranks exchange float16."""
    half = ir.DataType.FLOAT16
    block = Block()
    up, down = (block.weight(name, ir.tensor(np.full(shape, number, np.float16))) for name, shape, number in WEIGHTS)
    wide = block.op("Relu", block.op("MatMul", block.input("x", half, ["n", 64]), up))
    huge = block.op("MatMul", wide, down)
    less = block.op("Mul", block.op("Relu", huge), block.constant(0.01, np.float16))
    block.give(less, "y", ["n", 64], half)
    model = tmp_path / "model.onnx"
    save(block.model(), model)
    arguments = ("-d", "2xcpu", "--split-mode", "tensor", "--fill", "x=ones")
    said = splitc("compile", model, "-o", tmp_path / "package", *arguments, code=4).stderr
    assert f"'{huge.name}' of the unsplit model has numbers beyond the largest of float16" in " ".join(said.split())


def test_model_that_draws_random_numbers_is_said_to_differ_from_itself(tmp_path: Path) -> None:
    block = Block()
    value = block.input("x", FLOAT, ["n", 64])
    for number in range(4):
        value = block.op("RandomNormalLike", block.op("MatMul", value, block.w(f"w{number}", 64, 64)))
    block.give(value, "y", ["n", 64])
    model = tmp_path / "model.onnx"
    save(block.model(), model)
    splitc("compile", model, "-o", tmp_path / "package", "-d", "2xcpu", "--split-mode", "layer")
    said = splitc("check", tmp_path / "package", "--model", model, "--no-memory", code=4)
    assert "not compared: y, since two runs of the unsplit model itself differ there" in " ".join(said.stdout.split())
    assert "no output can be compared with model.onnx" in " ".join(said.stderr.split())


@pytest.mark.parametrize("kind", ["hard", "symbolic"])
def test_weights_in_files_that_are_links_are_nudged(kind: str, tmp_path: Path) -> None:
    """A cache of models has symbolic links, --weights link makes hard ones, and onnx's own function reads neither."""
    b = Block()
    row = b.weight("row", ir.tensor(b.random("row", 600)))
    b.give(b.op("Mul", b.data("x", (2, 600)), row), shape=[2, 600])
    ir.save(b.model(), tmp_path / "model.onnx", external_data="weights", size_threshold_bytes=0)
    plain = list(nudged_weights(tmp_path / "model.onnx"))
    (tmp_path / "weights").rename(tmp_path / "blob")
    link = os.link if kind == "hard" else os.symlink
    link(tmp_path / "blob", tmp_path / "weights")
    assert list(nudged_weights(tmp_path / "model.onnx")) == plain and len(set(plain)) > 1
