"""Tensors of PyTorch as arrays, and arrays as tensors: of number types that numpy lacks too, such as bfloat16."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

import numpy as np

from splitc.runtime.arrays.array import Array, number_type


def is_tensor(feed: object) -> bool:
    """Whether the object is a tensor of PyTorch: whoever has one has imported it."""
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(feed, torch.Tensor)


def read_tensor(tensor: Any) -> Array:
    """A tensor in the host's memory as an array, without a copy if it is contiguous. Raises what torch raises."""
    name = str(tensor.dtype).removeprefix("torch.")
    if np.dtype(kind := number_type(name)).isbuiltin == 1:
        return np.asarray(tensor.detach())
    flat = tensor.detach().contiguous().reshape(-1).view(sys.modules["torch"].uint8)
    array: Array = flat.numpy().view(kind).reshape(tuple(tensor.shape))
    return array


def to_torch(arrays: Mapping[str, Any]) -> dict[str, Any]:
    """Outputs as tensors of PyTorch, in the same memory: the host's, or a GPU's if they are there (`on_device`).

        tensors = to_torch(session.run({"pixels": torch.zeros(1, 3, 224, 224, dtype=torch.bfloat16)}))

    An array that can't be written to is copied.
    """
    import torch

    return {name: _tensor(torch, array) for name, array in arrays.items()}


def _tensor(torch: Any, array: Any) -> Any:
    if not isinstance(array, np.ndarray):
        return torch.from_dlpack(array)
    writable = array if array.flags.writeable else array.copy()
    if array.dtype.isbuiltin == 1:
        return torch.from_numpy(writable)
    flat = np.ascontiguousarray(writable).reshape(-1).view(np.uint8)
    return torch.from_numpy(flat).view(getattr(torch, array.dtype.name)).reshape(array.shape)
