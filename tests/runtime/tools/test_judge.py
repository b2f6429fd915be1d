"""What of a difference is the unsplit model's own doing."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from models.writer import save
from splitc.runtime.tools.compare import compare
from splitc.runtime.tools.judge import Arrays, judge
from tests.helpers.blocks import FLOAT, Block
from tests.helpers.command import splitc


def outputs(**values: float) -> Arrays:
    return {name: np.full((2, 2), value, np.float32) for name, value in values.items()}


def never() -> Arrays:
    raise AssertionError("the unsplit model need not run again")


def test_outputs_that_agree_are_compared_once() -> None:
    judged = judge(compare, outputs(y=1), outputs(y=1), never, never)
    assert (judged.passed, judged.notes) == (True, [])


def test_output_that_the_model_gives_otherwise_each_time_is_not_compared() -> None:
    judged = judge(compare, outputs(y=1, z=1), outputs(y=2, z=1), lambda: outputs(y=1.5, z=1), never)
    assert judged.passed
    assert "not compared: y" in judged.notes[0]


def test_output_that_optimizations_change_is_compared_without_them() -> None:
    plain = outputs(y=2, z=1)
    judged = judge(compare, outputs(y=1, z=1), outputs(y=2, z=1), lambda: outputs(y=1, z=1), lambda: plain)
    assert judged.passed
    assert "change y of the unsplit model by 1.0e+00" in judged.notes[0]


def test_any_other_difference_stays_one() -> None:
    judged = judge(compare, outputs(y=1), outputs(y=2), lambda: outputs(y=1), dict)
    assert [each.passed for each in judged.differences] == [False]
    judged = judge(compare, outputs(y=1), outputs(y=2), lambda: outputs(y=1), lambda: outputs(y=1.5))
    assert (judged.passed, judged.notes) == (False, [])


def test_model_that_draws_random_numbers_is_said_to_differ_from_itself(tmp_path: Path) -> None:
    block = Block()
    value = block.input("x", FLOAT, ["n", 64])
    for number in range(4):
        value = block.op("RandomNormalLike", block.op("MatMul", value, block.w(f"w{number}", 64, 64)))
    block.give(value, "y", ["n", 64])
    model = tmp_path / "model.onnx"
    save(block.model(), model)
    splitc("compile", model, "-o", tmp_path / "package", "-d", "2xcpu", "--split-mode", "layer")
    said = splitc("check", tmp_path / "package", "--model", model).stdout
    assert "not compared: y, since the unsplit model itself gives others" in " ".join(said.split())
