"""The IO binding of an ONNX Runtime session on a GPU, kept from run to run."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import numpy.typing as npt
import onnxruntime as ort

from splitc.runtime.arrays.array import number_type
from splitc.runtime.arrays.onnx_types import CODES
from splitc.runtime.engines.onnx_session import output_names
from splitc.runtime.gpu.array import GpuArray, Place


class KeptBinding:
    """The IO binding of a session on a `device` (a kind and an index).

    An array is only bound again if its address changes: to bind a decoder's hundred states takes half a millisecond.
    """

    def __init__(self, session: ort.InferenceSession, device: tuple[str, int]) -> None:
        self._session = session
        self._device = device
        self._names = output_names(session)
        self._begin()

    def _begin(self) -> None:
        self._binding = self._session.io_binding()
        self._inputs: dict[str, Place] = {}
        self._outputs: dict[str, Place] = {}
        self._bind_own(self._names)  # all: outputs are returned in the order in which they were bound first

    def run(
        self,
        inputs: Mapping[str, GpuArray],
        on_host: Mapping[str, npt.NDArray[Any]],
        into: Mapping[str, GpuArray],
        options: ort.RunOptions,
    ) -> dict[str, ort.OrtValue]:
        """Run on arrays of the device and of the host. Returns the outputs that are not in `into`, by name.

        The session allocates these, and the binding does not keep them. Raises what ONNX Runtime raises.
        """
        try:
            self._bind_own(self._outputs.keys() - into.keys())
            for name, array in on_host.items():
                self._binding.bind_cpu_input(name, array)
            for name, value in inputs.items():
                if _moves(self._inputs, name, value):
                    self._binding.bind_input(name, *self._device, *_described(value))
            for name, value in into.items():
                if _moves(self._outputs, name, value):
                    self._binding.bind_output(name, *self._device, *_described(value))
            self._session.run_with_iobinding(self._binding, options)
            values = self._binding.get_outputs_as_ortvaluevector()
            # Only these: to make an object for each state takes as long as to launch ten kernels.
            own = {name: ort.OrtValue(values[at]) for at, name in enumerate(self._names) if name not in into}
            self._bind_own(own)
            return own
        except BaseException:
            self._begin()  # only some may be bound by now
            raise

    def _bind_own(self, names: Iterable[str]) -> None:
        """Let the session allocate these outputs."""
        for name in names:
            self._outputs.pop(name, None)
            self._binding.bind_output(name, *self._device)


def _moves(places: dict[str, Place], name: str, value: GpuArray) -> bool:
    """Whether the array of this name has another address than in the last run. Records the new address."""
    before, places[name] = places.get(name), value.place
    return before is not value.place and before != value.place


def _described(value: GpuArray) -> tuple[Any, ...]:
    kind = CODES[value.dtype] if value.dtype in CODES else number_type(value.dtype).type
    return kind, value.shape, value.pointer
