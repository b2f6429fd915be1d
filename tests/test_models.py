"""The makers of models make models that run, and that are what they claim to be."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import onnx
import onnx_ir as ir
import pytest

from models.denoisers import save_without_weights
from models.llama import DTYPES, Size, build, main
from models.writer import Writer, save
from tests.conftest import run_split, run_whole
from tests.gpu.made_weights import make_missing_weights

LLAMA = str(Path(__file__).parents[1] / "models" / "llama.py")
SMALL = "--layers 2 --hidden 64 --heads 4 --kv-heads 2 --feed-forward 96 --vocabulary 80"


@pytest.mark.parametrize(("dtype", "experts"), [*((dtype, 0) for dtype in DTYPES), ("fp16", 4)])
def test_decoder_runs_and_splits(tmp_path: Path, dtype: str, experts: int) -> None:
    size = Size(hidden=64, feed_forward=96, vocabulary=80, heads=4, kv_heads=2, dtype=DTYPES[dtype], experts=experts)
    save(build(size), tmp_path / "model.onnx")
    onnx.checker.check_model(str(tmp_path / "model.onnx"), full_check=True)
    feeds: dict[str, np.ndarray] = {
        "input_ids": np.array([[1, 2, 3]]),
        "attention_mask": np.ones((1, 3), np.int64),
        "position_ids": np.array([[0, 1, 2]]),
    }
    for layer in range(2):
        for part in ("key", "value"):
            feeds[f"past_key_values.{layer}.{part}"] = np.zeros((1, 2, 0, 16), size.dtype.numpy())
    split = run_split(tmp_path / "model.onnx", tmp_path / "package", "2xcpu", feeds)
    if dtype == "bf16":  # which ONNX Runtime itself does not run on CPUs
        save(build(replace(size, dtype=ir.DataType.FLOAT)), tmp_path / "model.onnx")
        feeds = {name: array.astype(np.float32) if "past" in name else array for name, array in feeds.items()}
    whole = run_whole(tmp_path / "model.onnx", feeds)["logits"].astype(np.float32)
    assert 0.1 < np.abs(whole).std() < 10
    tolerance = {"fp32": 1e-5, "fp16": 2e-2, "bf16": 3e-2 * np.abs(whole).max()}[dtype]
    np.testing.assert_allclose(split["logits"].astype(np.float32), whole, rtol=0, atol=tolerance)


def test_cache_continues_where_it_was(tmp_path: Path) -> None:
    """Three tokens at once give the same as one after the other, with presents fed back as pasts."""
    save(build(Size(hidden=64, feed_forward=96, vocabulary=80, heads=4, kv_heads=2)), tmp_path / "model.onnx")
    names = [f"past_key_values.{layer}.{part}" for layer in range(2) for part in ("key", "value")]
    empty = {name: np.zeros((1, 2, 0, 16), np.float32) for name in names}
    ids = np.array([[7, 8, 9]])

    def feed(start: int, end: int, cache: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        places = np.arange(start, end)[None]
        return {
            "input_ids": ids[:, start:end],
            "attention_mask": np.ones((1, end), np.int64),
            "position_ids": places,
            **cache,
        }

    at_once = run_whole(tmp_path / "model.onnx", feed(0, 3, empty))
    cache = empty
    for place in range(3):
        step = run_whole(tmp_path / "model.onnx", feed(place, place + 1, cache))
        cache = {name: step[name.replace("past_key_values", "present")] for name in names}
        np.testing.assert_allclose(step["logits"][:, 0], at_once["logits"][:, place], rtol=0, atol=1e-5)


def test_sparse_model_has_its_size_but_takes_no_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "sparse.onnx"
    sizes = ["--layers", "8", "--hidden", "4096", "--heads", "32"]
    monkeypatch.setattr(sys, "argv", [LLAMA, "-o", str(path), *sizes, "--sparse"])
    main()
    data = path.with_name("sparse.onnx.data").stat()
    assert data.st_size > 1 << 30
    assert data.st_blocks * 512 < 1 << 20
    held = sum(value.const_value.nbytes for value in ir.load(path).graph.initializers.values() if value.const_value)
    assert held == data.st_size


def test_weights_are_the_same_each_time(tmp_path: Path) -> None:
    """Also from another process."""
    command = [sys.executable, LLAMA, "-o", str(tmp_path / "a.onnx"), *SMALL.split()]
    subprocess.run(command, check=True, cwd=Path(LLAMA).parents[1])
    save(build(Size(layers=2, hidden=64, heads=4, kv_heads=2, feed_forward=96, vocabulary=80)), tmp_path / "b.onnx")
    assert (tmp_path / "a.onnx.data").read_bytes() == (tmp_path / "b.onnx.data").read_bytes()


def test_model_without_weights_says_where_they_go(tmp_path: Path) -> None:
    """Weights have the layout of their use and begin on page boundaries. Random weights are made in their places."""
    w = Writer()
    x = w.input("x", ir.DataType.FLOAT, [2, 48])
    for name, size in ("first.weight", 64), ("second.weight", 32):
        weight = w.weight(name, ir.tensor(np.zeros((size, 48 if name[0] == "f" else 64), np.float32)))
        x = w.op("MatMul", x, w.op("Transpose", weight, perm=[1, 0]))
    w.output(x, "y", ir.DataType.FLOAT, [2, 32])
    path = tmp_path / "model.onnx"
    size = save_without_weights(w.model(), path)
    assert not (tmp_path / "model.onnx.data").exists()
    assert make_missing_weights(path) == size == 4096 * 3 + 64 * 32 * 4
    graph = ir.load(path).graph
    assert [node.op_type for node in graph] == ["MatMul", "MatMul"]
    assert graph.initializers["second.weight"].shape == (64, 32)
    assert np.abs(run_whole(path, {"x": np.ones((2, 48), np.float32)})["y"]).max() > 0
