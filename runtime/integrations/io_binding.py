"""ONNX Runtime's binding of inputs and outputs for a package, with arrays on the host."""

from __future__ import annotations

import ctypes
from collections.abc import Mapping, Sequence
from math import prod
from typing import Any

import numpy as np

from splitc.runtime.arrays.array import Array, number_type
from splitc.runtime.arrays.onnx_types import NAMES
from splitc.runtime.arrays.ort_values import host_array, host_value
from splitc.runtime.errors import MisuseError
from splitc.runtime.package.manifest import Tensor


class IoBinding:
    """Inputs and outputs of the next run. Outputs without memory of their own get new arrays.

    Values on a GPU are copied through the host: `Session.run` takes and returns arrays on GPUs.
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
        """Feed an OrtValue."""
        self.feeds[name] = host_array(ortvalue)

    def bind_input(
        self, name: str, device_type: str, device_id: int, element_type: Any, shape: Sequence[int], buffer_ptr: int
    ) -> None:
        """Feed the memory at an address, which is read when the package runs. Raises MisuseError for a GPU's memory."""
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
        """Request an output, in the memory at an address if given. Raises MisuseError for a GPU's memory."""
        place = None
        if buffer_ptr is not None:
            kind = self._types.get(name) if element_type is None else element_type
            place = _at(device_type, kind, shape or (), buffer_ptr)
        self.outputs[name] = place

    def bind_ortvalue_output(self, name: str, ortvalue: Any) -> None:
        """Request an output in an OrtValue's memory."""
        _need_host(ortvalue.device_name())
        self.outputs[name] = host_array(ortvalue)

    def fill(self, outputs: Mapping[str, Array]) -> None:
        """Copy a run's outputs into their memory. Raises MisuseError if a shape or type differs from the memory's."""
        self._made = []
        for name, place in self.outputs.items():
            array = outputs[name]
            if place is not None:
                if (place.shape, place.dtype) != (array.shape, array.dtype):
                    own, other = (f"the shape {one.shape} and the type {one.dtype}" for one in (array, place))
                    raise MisuseError(f"output '{name}' has {own}, and its place {other}")
                place[...] = array
            self._made.append(array if place is None else place)

    def get_outputs(self) -> list[Any]:
        """The outputs of the last run, as OrtValues."""
        return list(map(host_value, self._made))

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


def _need_host(device_type: str) -> None:
    if device_type != "cpu":
        raise MisuseError(f"a binding of a package is on the host, not on {device_type}: see Session.run for GPUs")


def _at(device_type: str, element_type: Any, shape: Sequence[int], address: int) -> Array:
    """The array at an address of the host. Its type is numpy's, or a name or ONNX's code of one."""
    _need_host(device_type)
    named = NAMES.get(element_type) if isinstance(element_type, int) else element_type
    if named is None:  # numpy would take it for float64
        raise MisuseError(f"a binding's memory has the type {element_type}, which is no number type of ONNX's")
    kind = number_type(named) if isinstance(named, str) else np.dtype(named)
    count = prod(shape)
    if not count:
        return np.empty(tuple(shape), kind)
    memory = (ctypes.c_uint8 * (count * kind.itemsize)).from_address(address)
    return np.ctypeslib.as_array(memory).view(kind).reshape(tuple(shape))
