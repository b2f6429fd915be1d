"""Caches that hold a window, as onnxruntime-genai's builder writes them: their rows are fixed."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import numpy.typing as npt
import onnx_ir as ir
import pytest

from models.llama import Size
from models.llama_fused import build
from models.writer import save
from splitc.compiler import Request, compile_model, plan_model
from splitc.runtime import Session
from splitc.runtime.package.manifest_file import read_manifest
from tests.conftest import assert_close
from tests.helpers.needs import IS_OLD

SMALL = Size(layers=2, hidden=64, heads=4, kv_heads=2, feed_forward=64, vocabulary=50)
WINDOW = 8


def write_windowed(folder: Path, holds_window: bool) -> Path:
    """A decoder whose first layer attends to a window. Its cache may hold no more, and has symbols for its sizes."""
    model = build(SMALL)
    node = next(node for node in model.graph if node.op_type == "GroupQueryAttention")
    node.attributes["local_window_size"] = ir.AttrInt64("local_window_size", WINDOW)
    if holds_window:
        node.attributes["sliding_window_cache"] = ir.AttrInt64("sliding_window_cache", 1)
        for value, rows in (*((v, "sliding") for v in node.inputs[3:5]), *((v, "slid") for v in node.outputs[1:3])):
            assert value is not None
            value.shape = ir.Shape(["batch", SMALL.kv_heads, rows, "width"])
    save(model, folder / "model.onnx")
    return folder / "model.onnx"


def package_of(folder: Path, holds_window: bool, mode: str) -> Path:
    folder.mkdir()
    request = Request(split_mode=mode, row_min=16) if mode == "row" else Request(split_mode=mode)
    plan = plan_model(write_windowed(folder, holds_window), ["2xcpu"], request)
    compile_model(plan, folder / "package", verify=False)
    return folder / "package"


def logits_of(package: Path, capacity: int | None) -> list[dict[str, npt.NDArray[np.float32]]]:
    """The logits after a prompt, and after each of more tokens than a window has rows."""
    ids = np.random.default_rng(0).integers(0, SMALL.vocabulary, (1, 24))
    with Session(package, threads=1) as session, session.start(capacity) as sequence:
        return [
            sequence.run({"input_ids": ids[:, start:end], "attention_mask": np.ones((1, end), np.int64)})
            for start, end in ((0, 5), (5, 7), *((end - 1, end) for end in range(8, 25)))
        ]


@pytest.mark.skipif(IS_OLD, reason="ONNX Runtime 1.23 (Python 3.10) has no such caches")
@pytest.mark.parametrize("mode", ["layer", "tensor", "row"])
def test_caches_that_hold_a_window_have_its_rows(tmp_path: Path, mode: str) -> None:
    package, whole = (package_of(tmp_path / str(holds), holds, mode) for holds in (True, False))
    with Session(package, threads=1) as session:
        rows = [tensor.shape[2:] for tensor in session.inputs if tensor.name.startswith("past") and tensor.shape]
        head = SMALL.hidden // SMALL.heads
        assert rows == [[WINDOW, head]] * 2 + [["past", head]] * 2
    expected = logits_of(whole, None)
    for capacity in (None, 24):
        for ours, theirs in zip(logits_of(package, capacity), expected, strict=True):
            assert_close(ours, theirs)


@pytest.mark.skipif(IS_OLD, reason="ONNX Runtime 1.23 (Python 3.10) has no such caches")
def test_package_names_the_caches_that_are_partly_unset(tmp_path: Path) -> None:
    """Their rows beyond the window's tokens are what the memory held: 'splitc check' would find them different."""
    present = ["present.0.key", "present.0.value"]
    assert read_manifest(package_of(tmp_path / "holds", True, "tensor")).unset == present
    assert read_manifest(package_of(tmp_path / "grows", False, "tensor")).unset == []
