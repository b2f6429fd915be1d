"""Weights that sessions share, on a GPU that is not there."""

from __future__ import annotations

from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

from splitc.runtime.devices import Device
from splitc.runtime.engines import gpu_weights
from splitc.runtime.engines.gpu_device import ALIGNED, GpuDevice
from splitc.runtime.engines.gpu_weights import can_share, place_weights
from splitc.runtime.manifest import Weight

pytestmark = pytest.mark.usefixtures("gpus")


@pytest.mark.parametrize("threads", [1, 3])
def test_weights_are_copied_as_they_are(threads: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In pieces, several at once; from any place of any file, of any type that is passed on."""
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


def test_types_that_can_not_be_passed_on_are_not_shared() -> None:
    assert not can_share(None)
    assert not can_share([Weight("weight", "float8_e4m3fn", [4], "stage0.weights", 0)])
