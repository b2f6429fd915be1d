"""ONNX Runtime's binding of inputs and outputs, for a package: arrays on the host."""

from __future__ import annotations

import ctypes
from collections.abc import Mapping, Sequence
from math import prod
from typing import Any

import numpy as np
import onnxruntime

from splitc.runtime.arrays.array import Array, number_type
from splitc.runtime.errors import MisuseError
from splitc.runtime.package.manifest import Tensor


class IoBinding:
    """Inputs and outputs of the next run. An output without a place of its own gets a new array.

    What is on a GPU is copied over the host: `Session.run` takes and gives arrays on GPUs.
    """

    def __init__(self, outputs: Sequence[Tensor]) -> None:
        self._types = {tensor.name: tensor.dtype for tensor in outputs}
        self.feeds: dict[str, Array] = {}
        self.outputs: dict[str, Array | None] = {}
        self._made: list[Array] = []

    def bind_cpu_input(self, name: str, arr_on_cpu: Array) -> None:
        """Feed an array."""
        self.feeds[name] = arr_on_cpu

    def bind_ortvalue_input(self, name: str, ortvalue: Any) -> None:
        """Feed an OrtValue, which is read now."""
        self.feeds[name] = ortvalue.numpy()

    def bind_input(
        self, name: str, device_type: str, device_id: int, element_type: Any, shape: Sequence[int], buffer_ptr: int
    ) -> None:
        """Feed the memory at an address. It is read when the package runs. Raises MisuseError for a GPU's."""
        self.feeds[name] = _at(device_type, element_type, shape, buffer_ptr)

    def bind_output(
        self,
        name: str,
        device_type: str = "cpu",
        device_id: int = 0,
        element_type: Any = None,
        shape: Sequence[int] | None = None,
        buffer_ptr: int | None = None,
    ) -> None:
        """Ask for an output, in the memory at an address if one is given. Raises MisuseError for a GPU's."""
        place = None
        if buffer_ptr is not None:
            kind = self._types.get(name) if element_type is None else element_type
            place = _at(device_type, kind, shape or (), buffer_ptr)
        self.outputs[name] = place

    def bind_ortvalue_output(self, name: str, ortvalue: Any) -> None:
        """Ask for an output in the memory of an OrtValue."""
        self.outputs[name] = _at("cpu", self._types[name], ortvalue.shape(), ortvalue.data_ptr())

    def fill(self, outputs: Mapping[str, Array]) -> None:
        """Take the outputs of a run. Raises MisuseError for one that has another shape than its place."""
        self._made = []
        for name, place in self.outputs.items():
            array = outputs[name]
            if place is not None:
                if place.shape != array.shape:
                    raise MisuseError(f"output '{name}' has the shape {array.shape}, and its place {place.shape}")
                place[...] = array
            self._made.append(array if place is None else place)

    def get_outputs(self) -> list[Any]:
        """The outputs of the last run, as OrtValues."""
        return [onnxruntime.OrtValue.ortvalue_from_numpy(np.asarray(array, order="C")) for array in self._made]

    def copy_outputs_to_cpu(self) -> list[Array]:
        """The outputs of the last run."""
        return list(self._made)

    def clear_binding_inputs(self) -> None:
        """Forget the inputs."""
        self.feeds.clear()

    def clear_binding_outputs(self) -> None:
        """Forget the outputs."""
        self.outputs.clear()
        self._made = []

    def synchronize_inputs(self) -> None:
        """Nothing to wait for: feeds are on the host."""

    def synchronize_outputs(self) -> None:
        """Nothing to wait for: outputs are on the host."""


def _at(device_type: str, element_type: Any, shape: Sequence[int], address: int) -> Array:
    """The array at an address of the host."""
    if device_type != "cpu":
        raise MisuseError(f"a binding of a package is on the host, not on {device_type}: see Session.run for GPUs")
    kind = number_type(element_type) if isinstance(element_type, str) else np.dtype(element_type)
    count = prod(shape)
    if not count:
        return np.empty(tuple(shape), kind)
    memory = (ctypes.c_uint8 * (count * kind.itemsize)).from_address(address)
    return np.ctypeslib.as_array(memory).view(kind).reshape(tuple(shape))
