"""CuPy's own arrays on simulated GPUs (`fake_cupy`). They can't be read without a copy to the host."""

from __future__ import annotations

import ctypes
import math
import types
from collections.abc import Sequence
from typing import Any

import numpy as np

from tests.helpers import fake_cupy
from tests.helpers.fake_cupy import Event, Memory


class GpuNdarray:
    """An array in a device's memory, which its stream may not have written yet."""

    def __init__(self, shape: Sequence[int], dtype: Any, order: str = "C") -> None:
        self.shape, self.dtype, self.order = tuple(shape), np.dtype(dtype), order
        self.ndim, self.nbytes = len(self.shape), math.prod(self.shape) * self.dtype.itemsize
        self.memory = Memory(max(1, self.nbytes))
        self.data = types.SimpleNamespace(ptr=self.memory.ptr)
        self.device = types.SimpleNamespace(id=getattr(fake_cupy.current, "device", 0))

    @property
    def numbers(self) -> Any:
        """The memory's present content, without waiting for streams."""
        return self.memory.bytes[: self.nbytes].view(self.dtype).reshape(self.shape, order=self.order)  # type: ignore

    def __array__(self, *_: object) -> Any:
        raise TypeError("implicit conversion to an array of numpy is not allowed")

    def __array_function__(self, function: Any, _: object, args: Any, options: Any) -> Any:
        """numpy's functions stand for CuPy's."""

        def plain(value: Any) -> Any:
            if isinstance(value, (list, tuple)):
                return type(value)(map(plain, value))
            return value.get() if isinstance(value, GpuNdarray) else value

        made = function(*plain(args), **options)
        return list(map(asarray, made)) if isinstance(made, list) else asarray(made)

    def __dlpack_device__(self) -> tuple[int, int]:
        return 2, self.device.id

    def __dlpack__(self, stream: int) -> GpuNdarray:
        """The array as a DLPack capsule. The stream waits for the current one."""
        event = Event()
        event.record(fake_cupy.current_stream())
        fake_cupy.STREAMS[stream].wait_event(event)
        return self

    def get(self) -> Any:
        """A copy on the host, after the current stream's work."""
        fake_cupy.current_stream().synchronize()
        return self.numbers.copy()

    def copy(self) -> GpuNdarray:
        """A copy, made asynchronously by the current stream."""
        made = GpuNdarray(self.shape, self.dtype)
        fake_cupy.current_stream().put(lambda: np.copyto(made.numbers, self.numbers))
        return made

    def reshape(self, shape: tuple[int, ...]) -> GpuNdarray:
        return asarray(self.get().reshape(shape))

    def astype(self, dtype: Any, copy: bool = True) -> GpuNdarray:
        return self if dtype == self.dtype and not copy else asarray(self.get().astype(dtype))


def asarray(array: Any, order: str | None = None) -> GpuNdarray:
    """A copy of a host array, at once; or a GPU array, copied if its elements are in another order."""
    if isinstance(array, GpuNdarray):
        return array if order is None or array.order == order else array.copy()
    made = GpuNdarray(array.shape, array.dtype)
    if made.nbytes:
        ctypes.memmove(made.data.ptr, np.ascontiguousarray(array).ctypes.data, made.nbytes)
    return made


def from_dlpack(array: Any) -> GpuNdarray:
    """The array that an object exports to the current stream."""
    passed: GpuNdarray = array.__dlpack__(stream=fake_cupy.current_stream().ptr)
    return passed


FUNCTIONS = {"empty": GpuNdarray, "asarray": asarray, "from_dlpack": from_dlpack}
