"""Tensors of PyTorch as feeds, and outputs as tensors. `make test-diffusers` runs this."""

from __future__ import annotations

from pathlib import Path

import ml_dtypes
import numpy as np
import onnx_ir as ir
import pytest

from splitc.compiler import Request, compile_model, plan_model
from splitc.runtime import FeedError, Session, to_torch
from splitc.runtime.hardware.devices import Device
from splitc.runtime.tools.unsplit import open_unsplit

torch = pytest.importorskip("torch")


@pytest.fixture
def brain(tmp_path: Path) -> Path:
    """A model with an input and an output of bfloat16, and of a type that numpy has."""
    text = """<ir_version: 10, opset_import: ["" : 21]>
    main (bfloat16[n, 4] x) => (bfloat16[n, 4] y, float[n, 4] z, bool[n, 4] b, bfloat16 last) {
        one = Constant <value = float[4, 4] {1, 2, 0, 0, 0, 1, 0, 0, 0, 0, 1, 3, 0, 0, 0, 1}> ()
        up = Cast <to = 1> (x)
        z = MatMul (up, one)
        y = Cast <to = 16> (z)
        zero = Constant <value = float {0}> ()
        b = Greater (z, zero)
        all = ReduceSum <keepdims = 0> (z)
        last = Cast <to = 16> (all)
    }"""
    ir.save(ir.from_onnx_text(text), tmp_path / "model.onnx")
    return tmp_path / "model.onnx"


@pytest.mark.parametrize("ranks", ["threads", "processes"])
def test_tensors_go_in_and_out(brain: Path, tmp_path: Path, ranks: str) -> None:
    compile_model(plan_model(brain, "cpu0", Request(split_mode="layer")), tmp_path / "package")
    x = torch.randn(4, 6, generator=torch.Generator().manual_seed(0)).to(torch.bfloat16).T
    assert not x.is_contiguous()
    with open_unsplit(brain, Device("cpu", 0), 1) as whole:
        expected = whole({"x": x.float().numpy().astype(ml_dtypes.bfloat16)})
    with Session(tmp_path / "package", ranks=ranks) as session:
        outputs = session.run({"x": x})
        tensors = to_torch(outputs)
        (later,) = session.map([{"x": x}])
    kinds = {"y": torch.bfloat16, "z": torch.float32, "b": torch.bool, "last": torch.bfloat16}
    assert {name: tensor.dtype for name, tensor in tensors.items()} == kinds
    for name, array in expected.items():
        assert tuple(tensors[name].shape) == array.shape
        assert torch.equal(tensors[name].float(), torch.from_numpy(np.asarray(array.astype(np.float32))))
        np.testing.assert_array_equal(later[name], outputs[name])
    tensors["z"][0, 0] = 7
    assert outputs["z"][0, 0] == 7, "it is the same memory"


def test_arrays_that_can_not_be_written_are_copied() -> None:
    array = np.arange(3.0)
    array.flags.writeable = False
    tensor = to_torch({"x": array})["x"]
    tensor[0] = 5
    assert array[0] == 0


def test_tensors_with_gradients_are_read_and_those_of_another_type_refused(brain: Path, tmp_path: Path) -> None:
    compile_model(plan_model(brain, "cpu0", Request(split_mode="layer")), tmp_path / "package")
    with Session(tmp_path / "package") as session:
        for kind in (torch.float32, torch.float16, torch.float8_e4m3fn):
            with pytest.raises(FeedError, match="and the model takes bfloat16"):
                session.run({"x": torch.zeros(1, 4).to(kind).requires_grad_(kind is torch.float32)})
        ones = torch.ones(1, 4, dtype=torch.bfloat16, requires_grad=True)
        np.testing.assert_array_equal(session.run({"x": ones})["z"], session.run({"x": ones.detach()})["z"])
