from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path

import numpy as np
import onnx
import onnx_ir as ir
import pytest

from models.llama import Size, build
from models.writer import save
from splitc.compiler.analysis import acceptance
from splitc.compiler.analysis.facts import analyze
from splitc.compiler.errors import ModelError
from splitc.compiler.request.shapes import AskedShapes
from splitc.runtime.engines.onnx_session import load_unoptimized
from tests.helpers.blocks import Block


def decoder(folder: Path, layers: int) -> Path:
    path = folder / f"{layers}.onnx"
    save(build(Size(layers, hidden=32, heads=4, kv_heads=2, feed_forward=48, vocabulary=64)), path)
    return path


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[Path | bytes]:
    """The files that ONNX Runtime is asked to load."""
    models: list[Path | bytes] = []

    def note(model: Path | bytes, *arguments: bool, **named: bool) -> object:
        models.append(model)
        return load_unoptimized(model, *arguments, **named)

    monkeypatch.setattr(acceptance, "load_unoptimized", note)
    return models


def test_layers_that_repeat_are_asked_once(tmp_path: Path, asked: list[Path | bytes]) -> None:
    for layers in (3, 8):
        analyze(decoder(tmp_path, layers), AskedShapes(), 1)
    few, many = (len(onnx.load_from_string(content).graph.node) for content in asked if isinstance(content, bytes))
    assert many - few < 5 * 6  # a layer has 70 nodes, and its cache makes outputs of the model
    assert len(asked) == 2


def test_one_odd_node_among_many_is_found(tmp_path: Path, asked: list[Path | bytes]) -> None:
    path = decoder(tmp_path, 12)
    model = onnx.load(path, load_external_data=False)
    odd = [node for node in model.graph.node if node.op_type == "Softmax"][9]
    odd.attribute.add(name="unheard_of", i=3, type=onnx.AttributeProto.INT)
    onnx.save(model, path)
    with pytest.raises(ModelError, match=r"ONNX Runtime can't load .*12.onnx: .*unheard_of"):
        analyze(path, AskedShapes(), 1)
    assert asked[-1] == path


@pytest.mark.parametrize(("dtype", "refused"), [(ir.DataType.FLOAT16, False), (ir.DataType.BFLOAT16, True)])
def test_sequences_of_bfloat16_are_refused(dtype: ir.DataType, refused: bool, tmp_path: Path) -> None:
    """They are replaced before the check, by nodes that ONNX Runtime takes."""
    b = Block(opset=18)
    weight = b.weight("w", ir.tensor(b.random("w", 8, 8).astype(dtype.numpy()), dtype))
    rows = b.op("MatMul", b.op("Cast", b.data("x", (2, 8), ["n", 8]), to=dtype), weight)
    halves = b.op("SplitToSequence", rows, b.constant([4, 4], np.int64), axis=-1)
    first, last = (b.op("SequenceAt", halves, b.constant(number, np.int64)) for number in (0, 1))
    b.give(b.op("Cast", b.op("Mul", first, last), to=ir.DataType.FLOAT), shape=["n", 4])
    save(b.model(), tmp_path / "model.onnx")
    with pytest.raises(ModelError, match=r"ONNX Runtime can't load .*SplitToSequence") if refused else nullcontext():
        analyze(tmp_path / "model.onnx", AskedShapes(), 1)


@pytest.mark.parametrize("given", [True, False])
def test_node_that_crashes_when_it_runs_is_refused(
    given: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """ONNX Runtime loads an attention without a bias, and would crash in the trial or at the first request."""
    b = Block()
    bias = [b.w("bias", 24)] if given else []
    b.give(b.op("com.microsoft.Attention", b.data("x", (2, 3, 8)), b.w("qkv", 8, 24), *bias, num_heads=2))
    save(b.model(), tmp_path / "model.onnx")
    monkeypatch.setattr("onnxruntime.__version__", "1.31.1")
    if given:
        analyze(tmp_path / "model.onnx", AskedShapes(), 1)
        return
    with pytest.raises(ModelError, match=r"1\.31\.1 crashes on node '/Attention'.* the bias\. Version 1\.32 runs it"):
        analyze(tmp_path / "model.onnx", AskedShapes(), 1)
