"""Engines that are ONNX files, run by ONNX Runtime on the CPU."""

from __future__ import annotations

import ctypes
import math
from collections.abc import Callable, Collection, Mapping
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import numpy.typing as npt
import onnxruntime as ort
from onnxruntime.capi import onnxruntime_pybind11_state as ort_errors

from splitc.runtime.arrays import accumulate_arrays, number_type
from splitc.runtime.engines.engine_kind import BackendOptions
from splitc.runtime.errors import EngineError, PackageError
from splitc.runtime.onnx_types import CODES, NAMES

# What ONNX Runtime raises has no common base but Exception.
ERRORS = (
    RuntimeError,
    ort_errors.EPFail,
    ort_errors.Fail,
    ort_errors.InvalidArgument,
    ort_errors.InvalidGraph,
    ort_errors.InvalidProtobuf,
    ort_errors.NoModel,
    ort_errors.NoSuchFile,
    ort_errors.NotImplemented,
    ort_errors.RuntimeException,
)


def open_session(path: Path, threads: int) -> ort.InferenceSession:
    """An ONNX Runtime session on the CPU with `threads` threads. Raises PackageError when the file can't be loaded."""
    options = ort.SessionOptions()
    options.intra_op_num_threads = threads
    options.inter_op_num_threads = 1
    options.log_severity_level = 4  # errors come as exceptions, and warnings are about what its optimizer did
    # The stages of one process take turns: a stage that is done must not keep spinning on the cores of the next.
    options.add_session_config_entry("session.force_spinning_stop", "1")
    try:
        return ort.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
    except ERRORS as error:
        raise PackageError(f"ONNX Runtime can't load {path}: {error}") from error


class OnnxRuntimeEngine:
    """One ONNX file in a session of its own. Values are OrtValues, which pass between sessions without a copy."""

    capture_blocker: str | None = None

    def __init__(self, name: str, session: ort.InferenceSession, options: ort.RunOptions) -> None:
        self._name = name
        self._session = session
        self._options = options
        self.inputs = [value.name for value in session.get_inputs()]
        self.optional = frozenset(value.name for value in session.get_overridable_initializers())
        self.outputs = [value.name for value in session.get_outputs()]

    def run(self, values: Mapping[str, Any], into: Mapping[str, Any] = MappingProxyType({})) -> dict[str, Any]:
        if not self.optional.isdisjoint(values):
            made = run_overridden(self._name, self._session, values)
            for name, value in into.items():
                host_array(value)[...] = host_array(made[name])
            return {**made, **into}
        # To keep a binding would save 2 microseconds. It costs more to bind inputs and outputs, and that must be done
        # each time: outputs that stay bound are written over.
        binding = self._session.io_binding()
        for name in self.inputs:
            binding.bind_ortvalue_input(name, values[name])
        for name in self.outputs:
            if name in into:
                binding.bind_ortvalue_output(name, into[name])
            else:
                binding.bind_output(name)
        try:
            self._session.run_with_iobinding(binding, self._options)
        except ERRORS as error:
            raise EngineError(f"{self._name} failed: {error}") from error
        binding.clear_binding_inputs()  # each output keeps its binding, which would keep the states before these
        # What was bound is handed back itself: another OrtValue on its memory would not keep that.
        return {name: into.get(name, value) for name, value in zip(self.outputs, binding.get_outputs(), strict=True)}


def run_overridden(
    name: str, session: ort.InferenceSession, values: Mapping[str, ort.OrtValue]
) -> dict[str, ort.OrtValue]:
    """Run on values on the host that replace weights, which a binding does not take. Raises EngineError."""
    outputs = [value.name for value in session.get_outputs()]
    options = ort.RunOptions()
    options.add_run_config_entry("gpu_graph_id", "-1")  # or a session for GPUs would capture what it is given once
    try:
        return dict(zip(outputs, session.run_with_ort_values(outputs, dict(values), options), strict=True))
    except ERRORS as error:
        raise EngineError(f"{name} failed: {error}") from error


class OnnxRuntimeBackend:
    """ONNX Runtime's CPU provider with a number of threads an engine."""

    asynchronous = False

    def __init__(self, threads: int) -> None:
        self.notes: list[str] = []
        self._threads = threads
        self._options = ort.RunOptions()
        # Without any entry ONNX Runtime 1.31 looks for this one in vain, by way of an exception: 40 microseconds a run.
        self._options.add_run_config_entry("gpu_graph_id", "-1")

    @classmethod
    def create(cls, options: BackendOptions) -> OnnxRuntimeBackend:
        """The backend of a CPU device."""
        return cls(options.threads)

    def attach(self) -> None:
        pass

    def detach(self) -> None:
        pass

    def load(self, path: Path, source: Path | None = None, sizes_only: Collection[str] = ()) -> OnnxRuntimeEngine:
        return OnnxRuntimeEngine(path.name, open_session(path, self._threads), self._options)

    def fetch(self, values: Mapping[str, Any]) -> Callable[[], dict[str, npt.NDArray[np.generic]]]:
        return partial(self.download, values)

    def persist_state(self, value: ort.OrtValue, before: ort.OrtValue | None) -> ort.OrtValue:
        return value

    def wait_all(self) -> None:
        pass

    def used_bytes(self) -> int | None:
        return None

    def reserve(self, size: int) -> None:
        pass

    def stop(self) -> None:
        self._options.terminate = True

    def upload(self, array: npt.NDArray[Any]) -> ort.OrtValue:
        return host_value(array)

    def zeros(self, shape: tuple[int, ...], dtype: str) -> ort.OrtValue:
        return host_value(np.zeros(shape, number_type(dtype)))

    def download(self, values: Mapping[str, Any]) -> dict[str, npt.NDArray[np.generic]]:
        return {name: host_array(value) for name, value in values.items()}

    def accumulate(self, operation: str, total: ort.OrtValue, part: ort.OrtValue) -> None:
        accumulate_arrays(operation, host_array(total), host_array(part))


def host_value(array: npt.NDArray[Any]) -> ort.OrtValue:
    """The array as an OrtValue, which keeps it and shares its memory."""
    whole = np.asarray(array, order="C")
    if (code := CODES.get(whole.dtype.name)) is not None:
        return ort.OrtValue.ortvalue_from_numpy_with_onnx_type(whole, code)
    return ort.OrtValue.ortvalue_from_numpy(whole)


def host_array(value: ort.OrtValue) -> npt.NDArray[Any]:
    """The value as an array on its memory. Of types that numpy lacks, ONNX Runtime gives no array, or one of bytes."""
    name = NAMES.get(value.element_type())
    if name is None:
        return np.asarray(value.numpy())
    dtype = number_type(name)
    memory = (ctypes.c_uint8 * (math.prod(value.shape()) * dtype.itemsize)).from_address(value.data_ptr())
    memory.owner = value  # type: ignore[attr-defined]  # the array keeps the one, and the one the other
    array: npt.NDArray[Any] = np.ctypeslib.as_array(memory).view(dtype).reshape(value.shape())
    return array
