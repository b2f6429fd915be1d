"""Host arrays as OrtValues, and OrtValues as arrays, in the same memory."""

from __future__ import annotations

import ctypes
import math
from functools import cache
from typing import Any

import numpy as np
import numpy.typing as npt
import onnxruntime as ort

from splitc.runtime.arrays.array import number_type
from splitc.runtime.arrays.onnx_types import CODES, KNOWN, NAMES


def host_value(array: npt.NDArray[Any]) -> ort.OrtValue:
    """The array as an OrtValue, which shares its memory and keeps it alive."""
    whole = np.asarray(array, order="C")
    if (code := _code(whole.dtype)) is None:
        return ort.OrtValue.ortvalue_from_numpy(whole)
    return ort.OrtValue.ortvalue_from_numpy_with_onnx_type(whole, code)  # a third of the other one's time


@cache
def _code(dtype: np.dtype[Any]) -> int | None:
    """ONNX's code of a type; None for text. Kept, since numpy takes microseconds to make a type's name."""
    return KNOWN.get(dtype.name) if dtype.isnative else None


def host_array(value: ort.OrtValue) -> npt.NDArray[Any]:
    """The value as an array that shares its memory, also for types that numpy lacks and ONNX Runtime can't convert."""
    name = NAMES.get(value.element_type())
    if name not in CODES:
        return np.asarray(value.numpy())
    dtype = number_type(name)
    memory = (ctypes.c_uint8 * (math.prod(value.shape()) * dtype.itemsize)).from_address(value.data_ptr())
    memory.owner = value  # type: ignore[attr-defined]  # the array keeps `memory` alive, and that keeps `value`
    array: npt.NDArray[Any] = np.ctypeslib.as_array(memory).view(dtype).reshape(value.shape())
    return array
