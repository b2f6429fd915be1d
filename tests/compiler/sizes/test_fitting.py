"""Input sizes that are not given are determined by running the graph."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Mapping
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import pytest

from models.writer import save
from splitc.compiler.analysis.facts import Analysis, analyze
from splitc.compiler.request.shapes import AskedShapes, Shape
from splitc.compiler.sizes import fitting
from splitc.compiler.sizes.fitting import WHOLE
from splitc.compiler.sizes.tried import Trial
from splitc.runtime.package.manifest import Fill
from tests.helpers.blocks import FLOAT, INT, Block
from tests.helpers.command import splitc
from tests.helpers.recurrent import write_lstm

WriteModel = Callable[[str], Path]


def fit(block: Block, folder: Path, given: Mapping[str, Shape] | None = None) -> Analysis:
    save(block.model(), folder / "model.onnx")
    return analyze(folder / "model.onnx", AskedShapes(given or {}), 1)


def image_block(channels: str = "channels") -> Block:
    """Patches of 4 x 4 of three planes, with nine positions."""
    block = Block()
    image = block.input("image", FLOAT, [1, channels, "height", "width"])
    patches = block.op("Conv", image, block.w("patch", 8, 3, 4, 4), strides=[4, 4])
    rows = block.op("Transpose", block.op("Reshape", patches, block.ints(0, 8, -1)), perm=[0, 2, 1])
    block.give(block.op("Add", rows, block.w("positions", 1, 9, 8)))
    return block


def test_channels_and_sides_of_an_image(tmp_path: Path) -> None:
    fitted = fit(image_block(), tmp_path).fitted
    assert fitted.shapes["image"] == (1, 3, 12, 12)
    assert (fitted.tried, fitted.problem) == (WHOLE, None)
    assert not fitted.bound.uncertain


def test_length_that_kernels_reach(tmp_path: Path) -> None:
    block = Block()
    value = block.op("Unsqueeze", block.input("sound", FLOAT, ["batch", "length"]), block.ints(1))
    for number, (kernel, stride) in enumerate(((127, 64), (7, 3))):
        value = block.op("Conv", value, block.w(f"w{number}", 1, 1, kernel), strides=[stride])
    block.give(value)
    analysis = fit(block, tmp_path)
    assert analysis.fitted.problem is None
    assert analysis.shapes["sound"][1] >= 127 + 6 * 64
    assert min(analysis.costs.shapes["y"]) > 0


def test_sizes_that_take_too_long_to_try_are_not_taken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only the whole model shows that a mask is too short. The mask is lengthened, not the sequence."""
    block = Block()
    new = block.input("new", FLOAT, [1, "length", 512])
    past = block.input("past", FLOAT, [1, "before", 8])
    mask = block.input("mask", FLOAT, [1, "total"])
    lengths = [block.op("Gather", block.op("Shape", value), block.constant(1, np.int64)) for value in (past, new)]
    zero, one = block.constant(0, np.int64), block.constant(1, np.int64)
    nothing = block.op("Mul", block.input("offset", INT, [1]), zero)  # what is known beforehand is tried node by node
    places = block.op("Add", block.op("Range", zero, block.op("Add", *lengths), one), nothing)
    scores = block.op("MatMul", new, block.op("Transpose", new, perm=[0, 2, 1]))
    block.give(scores, "scores")
    block.give(block.op("Gather", mask, places, axis=1), "picked")
    refusal = Trial.refusal

    def refuse(trial: Trial, shapes: Mapping[str, Shape], fills: Mapping[str, Fill]) -> str | None:
        return None if shapes["new"][1] > 1024 else refusal(trial, shapes, fills)  # as where the time is up

    monkeypatch.setattr(Trial, "refusal", refuse)
    fitted = fit(block, tmp_path, {"past": (1, 16, 8)}).fitted
    assert (fitted.problem, fitted.shapes["new"], fitted.shapes["mask"]) == (None, (1, 16, 512), (1, 32))


def test_past_length_of_a_model_without_caches(tmp_path: Path) -> None:
    block = Block()
    new = block.input("new", FLOAT, ["batch", "length", 8])
    mask = block.input("mask", FLOAT, ["batch", "past + length"])
    block.give(block.op("Add", new, block.op("Unsqueeze", mask, block.ints(2))))
    fitted = fit(block, tmp_path, {"new": (1, 6, 8)}).fitted
    assert (fitted.problem, fitted.shapes["mask"]) == (None, (1, 6))


def test_as_many_sizes_are_tried_on_a_busy_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A clock that jumps an hour at each reading changes nothing."""
    hours = count(step=3600.0)
    monkeypatch.setattr(time, "monotonic", lambda: next(hours))
    assert fit(image_block(), tmp_path).fitted.shapes["image"] == (1, 3, 12, 12)


def test_no_sizes_are_tried_twice_for_a_node(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tried: list[tuple[str, Mapping[str, int]]] = []
    why_not = fitting._Search._why_not

    def note(search: Any, refused: Any, changes: Mapping[str, int], reasons: Collection[str]) -> str | None:
        tried.append((refused.reason, search.inputs.changed(changes).sizes))
        return why_not(search, refused, changes, reasons)

    monkeypatch.setattr(fitting._Search, "_why_not", note)
    fit(image_block(), tmp_path)
    assert len(tried) == len({str(sizes) for sizes in tried}) > 20


def test_size_that_depends_on_data_is_no_broadcast(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It counts as 1 in costs, and the bias that is added to it has eight elements: no sizes are changed for that."""
    monkeypatch.setattr(fitting._Search, "_change", lambda *_: pytest.fail("sizes were changed"))
    block = Block()
    x = block.input("x", FLOAT, ["rows", 8])
    counted = block.op("Not", block.op("IsNaN", x))
    width = block.op("ReduceSum", block.op("Cast", counted, to=int(INT)), block.ints(1), keepdims=0)
    sizes = block.op("Concat", block.ints(-1), block.op("Slice", width, block.ints(0), block.ints(1)), axis=0)
    block.give(block.op("Add", block.op("Reshape", x, sizes), block.w("bias", 8)))
    assert "y" in fit(block, tmp_path).fitted.bound.uncertain


def test_sizes_that_are_not_found_end_the_search(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fitting, "MOST_TRIES", 1)
    assert fit(image_block(), tmp_path).fitted.problem is not None


def test_rows_that_belong_together(tmp_path: Path) -> None:
    """Four rows of one input for one row of another, as with codebooks; also if the first one's size is given."""
    assert fit(codebooks(), tmp_path).shapes == {"ids": (4, 6), "past": (1, 6)}
    assert fit(codebooks(), tmp_path, {"ids": (8, 6)}).shapes == {"ids": (8, 6), "past": (2, 6)}


def codebooks() -> Block:
    block = Block()
    ids = block.op("Reshape", block.input("ids", INT, ["rows", 6]), block.ints(-1, 4, 6))
    total = block.op("ReduceSum", block.op("Cast", ids, to=int(FLOAT)), block.ints(1), keepdims=0)
    past = block.input("past", FLOAT, ["batch", 6])
    block.give(block.op("Concat", past, total, axis=1), "y", ["batch", 12])
    return block


def test_head_size_of_a_cache_is_that_of_the_queries(tmp_path: Path) -> None:
    block = Block()
    past = [block.input(f"past_{part}", FLOAT, [1, 2, "past", "some_size"]) for part in ("key", "value")]
    queries = [block.data(name, (1, 4, size)) for name, size in SIZES.items()]
    mask = block.input("mask", INT, [1, "all"])
    count = block.op("ReduceSum", mask, block.ints(1), keepdims=0)
    total = block.op("Gather", block.op("Shape", mask), block.constant(1, np.int64))
    lengths = [
        block.op("Cast", value, to=int(ir.DataType.INT32)) for value in (block.op("Sub", count, block.ints(1)), total)
    ]
    made = block.ops(
        "com.microsoft.GroupQueryAttention", *queries, *past, *lengths, outputs=3, num_heads=4, kv_num_heads=2
    )
    block.give(made[0], "y", ["batch", 4, 32])
    for part, value in zip(("key", "value"), made[1:], strict=True):
        block.give(value, f"present_{part}", ["batch", 2, "present", "some_size"])
    assert fit(block, tmp_path).shapes["past_key"] == (1, 2, 0, 8)


SIZES = {"q": 32, "k": 16, "v": 16}


def test_number_that_a_size_follows_from(tmp_path: Path) -> None:
    block = Block()
    length = block.input("length", INT, [1])
    ones = block.op("ConstantOfShape", length, value=ir.tensor(np.ones(1, np.float32)))
    block.give(block.op("Slice", ones, block.ints(5), block.ints(6), block.ints(0)), "cut", ["m"])
    block.give(block.op("Gather", ones, block.ints(5)), "y", [1])
    fitted = fit(block, tmp_path).fitted
    assert fitted.problem is None
    assert fitted.fills == {"length": Fill("randint", 8, 9)}


def test_cache_that_may_not_be_empty(tmp_path: Path) -> None:
    block = Block()
    past = block.input("past", FLOAT, [1, "past", 8])
    last = block.op("Gather", past, block.constant(-1, np.int64), axis=1)
    step = block.op("Add", block.op("MatMul", last, block.w("w", 8, 8)), block.input("step", FLOAT, [1, 8]))
    new = block.op("Unsqueeze", step, block.ints(1))
    block.give(block.op("Neg", step), "y", [1, 8])
    block.give(block.op("Concat", past, new, axis=1), "present", [1, "past + 1", 8])
    analysis = fit(block, tmp_path)
    assert [(state.input, state.output) for state in analysis.states] == [("past", "present")]
    assert analysis.shapes["past"] == (1, 1, 8)


def test_window_that_is_larger_than_what_it_pools(tmp_path: Path) -> None:
    """ONNX Runtime would round the output up to 1. Sides of 16 are halved four times before."""
    block = Block()
    value = block.input("image", FLOAT, ["batch", 2, "height", "width"])
    for _ in range(5):
        value = block.op("MaxPool", value, kernel_shape=[2, 2], strides=[2, 2])
    block.give(value, shape=["batch", 2, "rows", "columns"])
    analysis = fit(block, tmp_path)
    assert analysis.fitted.problem is None
    assert analysis.costs.shapes["y"] == (1, 2, 1, 1)


def test_sizes_that_would_end_the_process_are_not_tried(tmp_path: Path) -> None:
    """ONNX Runtime's LSTM and GRU crash without rows."""
    write_lstm(tmp_path / "model.onnx")
    given: dict[str, Shape] = {"x": (3, 0, 6), "h": (1, 0, 5), "c": (1, 0, 5)}
    fitted = analyze(tmp_path / "model.onnx", AskedShapes(given), 1).fitted
    assert "(LSTM): ONNX Runtime crashes if its first input is 3 x 0 x 6" in (fitted.problem or "")


def test_pools_that_would_end_the_process_are_not_tried(tmp_path: Path) -> None:
    """ONNX Runtime's pools by blocks of channels crash if the window is larger than the image."""
    block = Block()
    image = block.input("image", FLOAT, ["batch", 2, "height", "width"])
    block.give(block.op("MaxPool", image, kernel_shape=[3, 3], strides=[2, 2], ceil_mode=1), shape=["?"] * 4)
    problem = fit(block, tmp_path, {"image": (1, 2, 1, 1)}).fitted.problem or ""
    assert "(MaxPool): ONNX Runtime crashes if its window is larger than its input, 1 x 1" in problem


def test_sizes_that_can_not_be_right_are_a_warning_of_plan_and_an_error_of_compile(tmp_path: Path) -> None:
    """A given size that the graph refuses stays as it is given."""
    save(image_block().model(), tmp_path / "model.onnx")
    arguments = (tmp_path / "model.onnx", "-d", "2xcpu", "--split-mode", "layer", "--shapes", "image:1x4x12x12")
    said = splitc("plan", *arguments).stderr
    assert "the model does not run with the planned sizes and made-up numbers" in " ".join(said.split())
    assert "give them (--shapes). If it takes other numbers, compile with these (--fill)" in " ".join(said.split())
    said = splitc("compile", *arguments, "-o", tmp_path / "package", code=1).stderr
    assert "C: 4 kernel channels: 3" in " ".join(said.split())
    assert not (tmp_path / "package").exists()
    splitc("compile", *arguments, "-o", tmp_path / "package", "--no-verify")
    assert (tmp_path / "package").is_dir()
    assert "the whole model was run" in splitc("compile", *arguments[:-2], "-o", tmp_path / "other").stdout


@pytest.mark.parametrize("channels", ["num-channels", "?"])
def test_sizes_without_a_name(tmp_path: Path, channels: str) -> None:
    assert fit(image_block(channels), tmp_path).shapes["image"] == (1, 3, 12, 12)
