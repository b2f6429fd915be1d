"""Weights that sessions share, on a fake GPU."""

from __future__ import annotations

from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

from splitc.runtime.gpu import weights as gpu_weights
from splitc.runtime.gpu.device import GpuDevice
from splitc.runtime.gpu.weight_places import ALIGNED, can_share
from splitc.runtime.gpu.weights import place_weights
from splitc.runtime.hardware.devices import Device
from splitc.runtime.package.manifest import Weight
from tests.helpers.needs import needs_dlpack

pytestmark = [
    pytest.mark.usefixtures("gpus"),
    needs_dlpack,
]


@pytest.mark.parametrize("threads", [1, 3])
def test_weights_are_copied_as_they_are(threads: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In pieces, several at once; from any offset of any file, of every number type."""
    monkeypatch.setattr(gpu_weights, "PIECE", 100)
    monkeypatch.setattr(gpu_weights, "COPYING", threads)
    arrays = {
        "half": np.arange(300, dtype=np.float16).reshape(3, 100),
        "brain": np.arange(70).astype(ml_dtypes.bfloat16),
        "whole": np.arange(5, dtype=np.int64),
        "none": np.zeros((0, 4), np.float32),
    }
    weights = []
    for number, (name, array) in enumerate(arrays.items()):
        file = tmp_path / f"{number % 2}.weights"
        with file.open("ab") as out:
            out.write(b"odd")
            weights.append(Weight(name, str(array.dtype), list(array.shape), file.name, out.tell()))
            out.write(array.tobytes())
    assert can_share(weights)
    gpu = GpuDevice(Device("cuda", 0))
    gpu.attach()
    values = place_weights(gpu, tmp_path, weights)
    assert values.keys() == arrays.keys()
    for name, array in arrays.items():
        assert tuple(values[name].shape()) == array.shape
        assert not array.size or values[name].data_ptr() % ALIGNED == values["half"].data_ptr() % ALIGNED
    assert values["brain"].data_type() == "tensor(bfloat16)"
    for name in ("half", "whole"):
        np.testing.assert_array_equal(values[name].numpy(), arrays[name])


def test_weights_with_a_key_are_there_once(tmp_path: Path) -> None:
    """On each GPU, while anyone holds them, whatever their names and files."""
    arrays = [np.arange(8, dtype=np.float32) + number for number in range(3)]
    (tmp_path / "one.weights").write_bytes(b"".join(array.tobytes() for array in arrays))
    (tmp_path / "other.weights").write_bytes(b"odd" + arrays[1].tobytes())
    one = [Weight(f"w{n}", "float32", [8], "one.weights", 32 * n, key) for n, key in enumerate(("", "a", "b"))]
    other = [Weight("v", "float32", [8], "other.weights", 3, "a"), Weight("own", "float32", [8], "one.weights", 64)]
    gpu = GpuDevice(Device("cuda", 0))
    gpu.attach()
    first, second = place_weights(gpu, tmp_path, one), place_weights(gpu, tmp_path, other)
    elsewhere = place_weights(GpuDevice(Device("cuda", 1)), tmp_path, other)
    assert second["v"].data_ptr() == first["w1"].data_ptr() != elsewhere["v"].data_ptr()
    assert second["own"].data_ptr() not in {value.data_ptr() for value in first.values()}
    for values, expected in ((first, arrays), (second, arrays[1:]), (elsewhere, arrays[1:])):
        for value, array in zip(values.values(), expected, strict=True):
            np.testing.assert_array_equal(value.numpy(), array)
    del first
    np.testing.assert_array_equal(second["v"].numpy(), arrays[1])
    assert set(gpu_weights._common) == {(0, "a"), (1, "a")}


def test_types_that_can_not_be_passed_on_are_not_shared() -> None:
    assert not can_share(None)
    assert not can_share([Weight("weight", "float8_e4m3fn", [4], "stage0.weights", 0)])
