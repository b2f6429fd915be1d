"""Host arrays as OrtValues, and OrtValues as arrays, in the same memory."""

from __future__ import annotations

import ctypes
import math
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import Any

import numpy as np
import numpy.typing as npt
import onnxruntime as ort

from splitc.runtime.arrays.array import number_type
from splitc.runtime.arrays.onnx_types import CODES, KNOWN, NAMES, read_type

# Returns a session's outputs by the arguments of `run_on_arrays` behind the session.
RunOnArrays = Callable[..., list[npt.NDArray[Any]]]


def host_value(array: npt.NDArray[Any]) -> ort.OrtValue:
    """The array as an OrtValue, which shares its memory and keeps it alive."""
    whole = np.asarray(array, order="C")
    if (code := _code(whole.dtype)) is None:
        made = ort.OrtValue.ortvalue_from_numpy(whole)
    else:
        made = ort.OrtValue.ortvalue_from_numpy_with_onnx_type(whole, code)  # a third of the other one's time
    made.array = whole
    return made


@cache
def _code(dtype: np.dtype[Any]) -> int | None:
    """ONNX's code of a type; None for text. Kept, since numpy takes microseconds to make a type's name."""
    return KNOWN.get(dtype.name) if dtype.isnative else None


def host_array(value: ort.OrtValue) -> npt.NDArray[Any]:
    """The value as an array that shares its memory, also for types that numpy lacks and ONNX Runtime can't convert.

    The array keeps the memory alive. That of ONNX Runtime's own would not if the memory is another array's.
    """
    if (known := getattr(value, "array", None)) is not None:  # of `host_value`
        return known  # type: ignore[no-any-return]
    name = NAMES.get(value.element_type())
    if name not in CODES:
        return np.asarray(value.numpy())
    dtype = number_type(name)
    memory = (ctypes.c_uint8 * (math.prod(value.shape()) * dtype.itemsize)).from_address(value.data_ptr())
    memory.owner = value  # type: ignore[attr-defined]  # the array keeps `memory` alive, and that keeps `value`
    array: npt.NDArray[Any] = np.ctypeslib.as_array(memory).view(dtype).reshape(value.shape())
    return array


def run_on_arrays(
    session: ort.InferenceSession,
    names: Sequence[str] | None,
    feeds: Mapping[str, npt.NDArray[Any]],
    options: ort.RunOptions | None = None,
) -> list[npt.NDArray[Any]]:
    """A CPU session's outputs of these names, or all, as arrays: also those of types that numpy lacks.

    Raises ONNX Runtime's errors.
    """
    return runner_on_arrays(session)(names, feeds, options)


def runner_on_arrays(session: ort.InferenceSession) -> RunOnArrays:
    """The function `run_on_arrays` of a session that runs often: the session's types are looked at once."""
    outputs = session.get_outputs()
    types = [value.type for value in (*session.get_inputs(), *outputs)]
    if not any(text.startswith("tensor(") and read_type(text) in CODES for text in types):
        return session.run  # type: ignore[no-any-return]
    everything = [value.name for value in outputs]

    def run(
        names: Sequence[str] | None, feeds: Mapping[str, npt.NDArray[Any]], options: ort.RunOptions | None = None
    ) -> list[npt.NDArray[Any]]:
        values = {name: host_value(array) for name, array in feeds.items()}
        made = session.run_with_ort_values(everything if names is None else names, values, options)
        return [host_array(value) for value in made]

    return run
